"""Known failure causes, each with a remedy. A cause is recognised from a rank's error message."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Kind = Literal[
    "gpu-memory", "host-memory", "disk", "time-out", "port", "version", "not-finite", "killed",
    "gpu-fault", "gpu-taken", "gpu-link", "shared-memory", "network", "lost-rank", "driver", "compiler", "limits",
]  # fmt: skip


class Remedy(msgspec.Struct, frozen=True):
    """A known failure cause and its remedy; `may_repeat` is True if rerunning the unchanged job may succeed."""

    kind: Kind
    text: str
    may_repeat: bool = True


# Patterns in messages from PyTorch, NCCL, the kernel and our own code; the first match wins.
_KNOWN: tuple[tuple[str, Remedy], ...] = (
    (
        r"too little free memory|CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"
        r"|Cuda failure (2 )?'out of memory'|CUDA driver error: out of memory",
        Remedy("gpu-memory", "clone the job with half the train.batch_size, or choose GPUs with more memory", False),
    ),
    (
        r"shared memory segment|ncclShm|posix_fallocate|/dev/shm.*No space left|No space left.*/dev/shm",
        Remedy(
            "shared-memory",
            "/dev/shm is full or too small: remove old files there, or start the container with --shm-size=1g",
            False,
        ),
    ),
    (
        r"was killed \(SIGBUS\)",
        Remedy(
            "shared-memory",
            "/dev/shm is full, or a file that the job reads was truncated or cannot be read; resume the job",
        ),
    ),
    (
        r"machine ran out of memory|can't allocate memory|Cannot allocate memory|MemoryError|bad_alloc",
        Remedy("host-memory", "lower train.batch_size, run fewer jobs at once, or free memory on this machine", False),
    ),
    (
        r"triton/.*(Stale file handle|resource busy|No such file)|(Stale file|resource busy|No such file).*triton/",
        Remedy("compiler", "several processes wrote to one kernel cache; set TRITON_CACHE_DIR to a local folder"),
    ),
    (
        r"Failed to find C compiler|ptxas|(gcc|cuda_utils).*returned non-zero exit status|Python\.h: No such file",
        Remedy("compiler", "Triton cannot compile here: it needs gcc and Python's headers (python3-dev)", False),
    ),
    (
        r"No space left|disk .*is full|Disk quota exceeded|free some space|Read-only file system",
        Remedy("disk", "free disk space or raise the quota, then resume the job; its last good checkpoint is intact"),
    ),
    (
        r"address already in use|EADDRINUSE|connectFullMesh failed",
        Remedy("port", "another process uses the port; resume the job, which then uses a new port"),
    ),
    (
        r"Too many open files",
        Remedy("limits", "raise the limit on open files (`ulimit -n 65536`) in the shell that starts the app", False),
    ),
    (
        r"No module named '(torch|numpy|safetensors)",
        Remedy("version", "a package was removed after the launch; `sae-tui doctor` shows how to install it again"),
    ),
    (
        r"CUDA driver error: (operation )?not supported",
        Remedy(
            "version", "virtual GPUs require PYTORCH_ALLOC_CONF=expandable_segments:False in the environment", False
        ),
    ),
    (
        r"its GPU or a disk hangs",
        Remedy(
            "gpu-fault",
            "reset the GPU (`nvidia-smi --gpu-reset`) and resume the job, or clone it onto another GPU",
            False,
        ),
    ),
    (
        r"uncorrectable ECC|Cuda failure (214|'uncorrectable)",
        Remedy(
            "gpu-fault", "the GPU's memory is failing: reset it (`nvidia-smi --gpu-reset`), or resume on other GPUs"
        ),
    ),
    (
        r"illegal memory access|illegal instruction|unspecified launch failure|misaligned address|hardware stack error"
        r"|device-side assert|launch timed out|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)|fallen off the bus"
        r"|GPU is lost|\bXid \d|(CUDA (driver )?error: |Cuda failure (999 )?')unknown error|reset required",
        Remedy("gpu-fault", "the GPU or its driver failed; the GPU's page shows its last error; resume on another GPU"),
    ),
    (
        r"\(NVLS\)|nvls\.cc|Multicast memory|failure 401|performed in the present state",
        Remedy(
            "gpu-link",
            "NVSwitch multicast fails: start the job with NCCL_NVLS_ENABLE=0, or restart fabricmanager",
            False,
        ),
    ),
    (
        r"cuMem|shareable handle|failure 217|peer access is not supported|HOST_NUMA",
        Remedy(
            "gpu-link",
            "GPUs cannot share memory here: start the job with NCCL_CUMEM_HOST_ENABLE=0, or NCCL_P2P_DISABLE=1",
            False,
        ),
    ),
    (
        r"system not yet initialized|SystemNotReady|error 802|failure 802|fabric ?manager",
        Remedy("driver", "start the nvidia-fabricmanager version that matches the driver, and resume the job", False),
    ),
    (
        r"driver/library version mismatch|error 803|unsupported display driver",
        Remedy("driver", "the driver was replaced while it was loaded: restart the machine", False),
    ),
    (
        r"CUDA unknown error|CUDA (driver )?initialization (failed|error)|CUDA error: initialization error",
        Remedy("driver", "the driver is not ready: see `nvidia-smi`; reload nvidia_uvm, or restart the machine", False),
    ),
    (
        r"busy or unavailable",
        Remedy("gpu-taken", "another process uses the GPU exclusively; choose other GPUs, or wait until it ends"),
    ),
    (
        r"Duplicate GPU detected|invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device",
        Remedy("gpu-taken", "some ranks do not see a GPU: check CUDA_VISIBLE_DEVICES and `sae-tui gpus`", False),
    ),
    (
        r"driver version is insufficient|no kernel image|sees \d+ GPUs, so rank|forward compatibility"
        r"|unsupported toolchain|CUDA driver is too old",
        Remedy("version", "the PyTorch build does not match this driver; see `sae-tui doctor`", False),
    ),
    (
        r"no socket interface|NCCL_SOCKET_IFNAME|neither AF_INET|ibv_|NET/(IB|OFI|Socket)|Call to (connect|bind)"
        r"|socketStartConnect|Connect to \S+<\d+> failed",
        Remedy(
            "network",
            "the ranks cannot reach each other: set NCCL_SOCKET_IFNAME (or NCCL_IB_DISABLE=1), and resume the job",
        ),
    ),
    (
        r"Watchdog caught collective operation timeout|watchdog got stuck|Heartbeat monitor timed out"
        r"|NCCL.*time-?d? ?out|(?:made|took) no step for|Timed out waiting",
        Remedy(
            "time-out", "a rank or the link between GPUs hung; the attempt's stacks.txt shows where; resume the job"
        ),
    ),
    (
        r"ncclRemoteError|remote process (exited|has terminated)|Call to (recv|send)|Socket recv failed"
        r"|(gloo|NCCL|another rank).*Connection (closed|reset) by (remote )?peer",
        Remedy("lost-rank", "another rank ended first: its log shows why; resume the job"),
    ),
    (
        r"the GPUs (?:do not|cannot) exchange data",
        Remedy("gpu-link", "run `sae-tui doctor --probe`; disable ACS and IOMMU in the BIOS, or use fewer GPUs", False),
    ),
    (
        r"ncclSystemError|System call \(",
        Remedy("network", "NCCL cannot use the network or /dev/shm; with NCCL_DEBUG=WARN, the log shows which of them"),
    ),
    (
        r"DistBackendError|NCCL error|nccl[A-Z]\w+Error|ncclInvalid",
        Remedy("gpu-link", "NCCL failed; resume the job with NCCL_DEBUG=WARN, so that the log shows the cause"),
    ),
    (
        r"the ranks could not find each other",
        Remedy("network", "a rank did not start, or the ranks cannot reach each other: see the logs of all ranks"),
    ),
    (
        r"not finite|no longer finite|(contains|holds) (a )?NaN",
        Remedy("not-finite", "lower train.lr, or check the activations for broken values", False),
    ),
    (
        r"was killed \(SIGKILL\)",
        Remedy("killed", "often the kernel's OOM killer, when memory runs out: check `dmesg -T | grep -i oom`"),
    ),
)


def remedy(error: str | None) -> Remedy | None:
    """Return the remedy for an error, or None if its cause is unknown."""
    return next((cause for pattern, cause in _KNOWN if error and re.search(pattern, error, re.IGNORECASE)), None)
