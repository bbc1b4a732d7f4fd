"""Tests for known causes of failure, with real messages from PyTorch, NCCL, Triton and Linux found in user reports."""

from __future__ import annotations

import pytest

from sae_tui.jobs.known_failures import remedy
from trainer.ranks.staging import HOPELESS

UNMET = "the ranks could not find each other"
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, "
UNHANDLED = f"{NCCL}unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5: "
SYSTEM = f"{NCCL}unhandled system error (run with NCCL_DEBUG=INFO for details): "
REMOTE = f"{NCCL}remote process exited or there was a network error, NCCL version 2.21.5: "

# Each entry has the source of the report, the message, the kind of cause, whether a retry is allowed, and a word from
# the remedy.
REPORTED = [
    ("", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "gpu-memory", False, "batch_size"),
    ("", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "gpu-memory", False, "GPUs"),
    ("pytorch#152302", f"{UNHANDLED}Cuda failure 2 'out of memory'", "gpu-memory", False, "batch_size"),
    ("nccl#1235", f"{UNHANDLED}Cuda failure 'out of memory'", "gpu-memory", False, "batch_size"),
    ("", "rank 0 was killed by the kernel because the machine ran out of memory", "host-memory", False, "batch_size"),
    ("", "[enforce fail] DefaultCPUAllocator: can't allocate memory", "host-memory", False, "free"),
    ("", "OSError: [Errno 12] Cannot allocate memory", "host-memory", False, "free"),
    ("", "MemoryError", "host-memory", False, "free"),
    ("", "terminate called after throwing an instance of 'std::bad_alloc'", "host-memory", False, "free"),
    ("", "OSError: [Errno 28] No space left on device: '/data/runs/3'", "disk", True, "quota"),
    ("", "OSError: [Errno 122] Disk quota exceeded", "disk", True, "quota"),
    ("", "OSError: [Errno 30] Read-only file system: '/data'", "disk", True, "quota"),
    (
        "nccl#342",
        f"{SYSTEM}Error while creating shared memory segment /dev/shm/nccl-pZafXL (size 9637888)",
        "shared-memory", False, "--shm-size",
    ),
    (
        "ci-infra#490",
        f"{SYSTEM}failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on device (28)",
        "shared-memory", False, "--shm-size",
    ),
    ("vllm#1710", "ncclShmOpen(shmPath, resources->shmSize) failed", "shared-memory", False, "--shm-size"),
    ("pytorch#5040", "rank 3 was killed (SIGBUS)", "shared-memory", True, "/dev/shm"),
    ("", "CUDA driver error: out of memory", "gpu-memory", False, "batch_size"),
    ("", "CUDA driver error: unknown error", "gpu-fault", True, "on another GPU"),
    ("", HOPELESS, "gpu-link", False, "--probe"),
    ("", f"{UNMET} (timed out after 600 s)", "network", True, "logs"),
    ("", "The server socket has failed to listen: EADDRINUSE, address already in use", "port", True, "port"),
    ("", "RuntimeError: Gloo connectFullMesh failed with [..] no error", "port", True, "port"),
    ("", "ModuleNotFoundError: No module named 'torch'", "version", True, "doctor"),
    ("", "The NVIDIA driver version is insufficient for CUDA runtime version", "version", False, "doctor"),
    ("", "CUDA error: no kernel image is available for execution on the device", "version", False, "doctor"),
    ("llm.c#63", "the provided PTX was compiled with an unsupported toolchain.", "version", False, "doctor"),
    ("", "RuntimeError: CUDA driver error: operation not supported", "version", False, "expandable_segments"),
    ("pytorch#152780", "CUDA error: an illegal memory access was encountered", "gpu-fault", True, "on another GPU"),
    ("", "CUDA driver error: an illegal memory access was encountered", "gpu-fault", True, "on another GPU"),
    ("pytorch#131755", f"{UNHANDLED}Cuda failure 700 'an illegal memory access '", "gpu-fault", True, ""),
    ("sglang#9172", "CUDA error: an illegal instruction was encountered", "gpu-fault", True, ""),
    ("pytorch#74235", "RuntimeError: CUDA error: unspecified launch failure", "gpu-fault", True, "on another GPU"),
    ("mamba#492", "RuntimeError: Triton Error [CUDA]: misaligned address", "gpu-fault", True, "on another GPU"),
    ("pykeen#236", "RuntimeError: CUDA error: device-side assert triggered", "gpu-fault", True, "on another GPU"),
    ("pytorch#170045", f"{UNHANDLED}Cuda failure 999 'unknown error'", "gpu-fault", True, "on another GPU"),
    ("pytorch#74235", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", "gpu-fault", True, ""),
    ("", "rank 3 did not exit within 60 s of being killed, so its GPU or a disk hangs", "gpu-fault", False, ""),
    ("vllm#5222", "RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu-fault", True, "--gpu-reset"),
    ("", "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", "gpu-fault", True, "on another GPU"),
    (
        "pytorch#177472",
        f"{UNHANDLED}Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the "
        "operation cannot be performed in the present state'. This is usually caused by a system or configuration "
        "error in the Fabric Manager or NVSwitches.",
        "gpu-link", False, "NCCL_NVLS_ENABLE=0",
    ),
    ("nccl#1788", f"{UNHANDLED}Cuda failure 401 'the operation cannot be performed in the present state'",
     "gpu-link", False, "NCCL_NVLS_ENABLE=0"),
    (
        "nccl#1838", f"{UNHANDLED}Cuda failure 217 'peer access is not supported between these two devices'",
        "gpu-link", False, "NCCL_CUMEM_HOST_ENABLE=0",
    ),
    ("nccl#1647", "cuMemImportFromShareableHandle() fails", "gpu-link", False, "NCCL_P2P_DISABLE=1"),
    ("nccl#1410", f"{UNHANDLED}Cuda failure 1 'invalid argument'", "gpu-link", True, "NCCL_DEBUG"),
    ("", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", "gpu-link", True, "NCCL_DEBUG"),
    ("pytorch#35710", "cuda runtime error (802) : system not yet initialized", "driver", False, "fabricmanager"),
    ("pytorch#45109", "Failed to initialize NVML: Driver/library version mismatch", "driver", False, "restart"),
    ("pytorch#49081", "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment",
     "driver", False, "nvidia_uvm"),
    ("llama.cpp#11841", "CUDA-capable device(s) is/are busy or unavailable", "gpu-taken", True, "other GPUs"),
    ("verl#161", f"{NCCL}invalid usage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10",
     "gpu-taken", False, "CUDA_VISIBLE_DEVICES"),
    ("", "RuntimeError: CUDA error: invalid device ordinal", "gpu-taken", False, "CUDA_VISIBLE_DEVICES"),
    (
        "nccl#1837",
        f"{NCCL}internal error: ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor "
        "AF_INET6(10)",
        "network", True, "NCCL_SOCKET_IFNAME",
    ),
    ("nccl#111", f"{SYSTEM}Call to connect failed : Connection refused", "network", True, "NCCL_SOCKET_IFNAME"),
    ("stanford_alpaca#207", f"{REMOTE}NET/IB : Got completion from peer 11.214.147.122<39138> with error 12, opcode 0",
     "network", True, "NCCL_IB_DISABLE"),
    ("nccl#975", f"{SYSTEM}ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
     "network", True, "NCCL_DEBUG"),
    ("nccl#2076", f"{REMOTE}socketProgressOpt: Call to recv from 172.1.2.3<33759> failed : Connection reset by peer",
     "lost-rank", True, "log"),
    ("nccl#934", f"{REMOTE}ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
     "lost-rank", True, "log"),
    ("", "RuntimeError: [gloo] Connection closed by peer [10.0.0.1]:4", "lost-rank", True, "log"),
    (
        "Megatron-LM#935",
        "[PG 1 Rank 7] Process group watchdog thread terminated with exception: [Rank 7] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=199, OpType=_REDUCE_SCATTER_BASE, Timeout(ms)=600000)",
        "time-out", True, "stacks.txt",
    ),
    ("LlamaFactory#6953", "[PG 0 Rank 144] Heartbeat monitor timed out! Process will be terminated",
     "time-out", True, "stacks.txt"),
    ("dinov2#447", "ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress",
     "time-out", True, "stacks.txt"),
    ("", "NCCL communicator timed out", "time-out", True, "stacks.txt"),
    ("", "took no step for 600 s and was ended: rank 1 is halted (SIGSTOP)", "time-out", True, "stacks.txt"),
    (
        "triton#11512", "OSError: [Errno 16] Device or resource busy: '/home/me/.triton/cache/tmp.pid_42'",
        "compiler", True, "TRITON_CACHE_DIR",
    ),
    ("prime-rl#2305", "ImportError: /home/me/.triton/cache/ab/__triton_launcher.so: cannot stat shared object: Stale "
     "file handle", "compiler", True, "TRITON_CACHE_DIR"),
    ("ComfyUI-WanVideoWrapper#655", "Failed to find C compiler. Please specify via CC environment variable",
     "compiler", False, "gcc"),
    ("pytorch#92745", "Command '['/usr/bin/gcc', '/tmp/x/main.c', '-lcuda']' returned non-zero exit status 1.",
     "compiler", False, "gcc"),
    ("pytorch#11201", "OSError: [Errno 24] Too many open files", "limits", False, "ulimit"),
    ("", "RuntimeError: the loss is not finite at step 12", "not-finite", False, "train.lr"),
    ("", "data.path: shard 3 holds a NaN", "not-finite", False, "train.lr"),
    ("", "train.lr: the gradients of all SAEs are no longer finite; choose a lower rate", "not-finite", False, "train"),
    ("", "data.path: rows contains NaN or infinite values in row 3", "not-finite", False, "train.lr"),
    ("", "rank 0 was killed (SIGKILL)", "killed", True, "dmesg"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "error", "kind", "may_repeat", "advised"), REPORTED)
def test_a_known_failure_gets_advice_and_a_decision_about_retrying(where, error, kind, may_repeat, advised):
    advice = remedy(f"rank 1: {error}")
    assert (advice.kind, advice.may_repeat) == (kind, may_repeat)
    assert advised in advice.text


@pytest.mark.parametrize(
    "error",
    [
        None, "", "rank 0 was killed (SIGSEGV)", "ValueError: step 12 is wrong", "sae.cfg_version: version mismatch",
        "data.path: the hub refused the connection (Connection refused)", "[Errno 32] Broken pipe",
        "data.path: /dev/shm/acts: shard 3 is missing", "hf.co: [Errno 104] Connection reset by peer",
        "Connect to huggingface.co failed", "data.path: No such file: /data/triton-sae", "nvls/xx is missing",
    ],
)  # fmt: skip
def test_an_unknown_failure_gets_no_advice(error):
    assert remedy(error) is None
