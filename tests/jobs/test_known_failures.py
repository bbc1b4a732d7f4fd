"""Known causes of failures."""

from __future__ import annotations

import pytest

from sae_tui.jobs.known_failures import remedy


@pytest.mark.parametrize(
    ("error", "kind", "may_repeat"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "gpu-memory", False),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "gpu-memory",
            False,
        ),
        ("rank 0 was killed by the kernel because the machine ran out of memory", "host-memory", False),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",
            "host-memory",
            False,
        ),
        ("OSError: [Errno 12] Cannot allocate memory", "host-memory", False),
        ("MemoryError", "host-memory", False),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "host-memory", False),
        ("OSError: [Errno 28] No space left on device: '/data/runs/3'", "disk", True),
        ("OSError: [Errno 122] Disk quota exceeded", "disk", True),
        ("OSError: [Errno 30] Read-only file system: '/data'", "disk", True),
        ("The server socket has failed to listen: EADDRINUSE, address already in use", "port", True),
        ("RuntimeError: Gloo connectFullMesh failed with [..] no error", "port", True),
        ("ModuleNotFoundError: No module named 'torch'", "version", True),
        ("RuntimeError: The NVIDIA driver version is insufficient for CUDA runtime version", "version", False),
        ("CUDA error: no kernel image is available for execution on the device", "version", False),
        ("RuntimeError: CUDA driver error: operation not supported", "version", False),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)", "time-out", True),
        ("NCCL communicator timed out", "time-out", True),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", "time-out", True),
        ("made no step for 600 s and was ended: rank 1 is halted (SIGSTOP)", "time-out", True),
        ("RuntimeError: [gloo] Connection closed by peer [10.0.0.1]:4", "time-out", True),
        ("RuntimeError: the loss is not finite at step 12", "not-finite", False),
        ("data.path: shard 3 holds a NaN", "not-finite", False),
        ("rank 0 was killed (SIGKILL)", "killed", True),
    ],
)
def test_a_known_failure_says_what_to_do_and_whether_it_may_be_tried_again(error, kind, may_repeat):
    advice = remedy(f"rank 1: {error}")
    assert (advice.kind, advice.may_repeat) == (kind, may_repeat)
    assert advice.text


@pytest.mark.parametrize("error", [None, "", "rank 0 was killed (SIGSEGV)", "ValueError: step 12 is wrong"])
def test_an_unknown_failure_is_left_to_who_reads_it(error):
    assert remedy(error) is None
