"""Known causes of failures, and where a process is that makes no step."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from sae_tui.jobs.known_failures import remedy
from sae_tui.jobs.launchers import stacks
from sae_tui.jobs.launchers.stacks import dump_stacks, odd_state
from trainer.contract.process import ProcessRef


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
        ("RuntimeError: The NVIDIA driver version is insufficient for CUDA runtime version", "version", False),
        ("CUDA error: no kernel image is available for execution on the device", "version", False),
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
    found = remedy(f"rank 1: {error}")
    assert (found.kind, found.may_repeat) == (kind, may_repeat)
    assert found.text


@pytest.mark.parametrize("error", [None, "", "rank 0 was killed (SIGSEGV)", "ValueError: step 12 is wrong"])
def test_an_unknown_failure_is_left_to_who_reads_it(error):
    assert remedy(error) is None


# stacks


WAITS = """
import sys, time
def waits_for_ever():
    print("here", flush=True)
    time.sleep(600)
waits_for_ever()
"""


@pytest.fixture
def process():
    started = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "here\n"
    yield started
    started.kill()
    started.communicate()


def test_a_halted_process_is_told_from_one_that_waits(process, box):
    assert odd_state(process.pid) == ""
    process.send_signal(signal.SIGSTOP)
    box.wait_for(lambda: odd_state(process.pid) == "is halted (SIGSTOP)", "the halt")
    process.kill()
    process.wait()
    assert odd_state(process.pid) == ""


def test_the_stack_of_a_halted_process_is_written(process, tmp_path, box):
    if stacks._py_spy() is None:
        pytest.skip("py-spy is not installed")
    process.send_signal(signal.SIGSTOP)
    box.wait_for(lambda: odd_state(process.pid), "the halt")
    dump_stacks({"rank 0": ProcessRef.of(process.pid)}, tmp_path / "stacks.txt")
    written = (tmp_path / "stacks.txt").read_text()
    assert written.startswith(f"== rank 0 (pid {process.pid}) is halted (SIGSTOP)\n")
    if "Permission denied" in written:
        pytest.skip("this user may not read the memory of another process")
    assert "waits_for_ever" in written
    assert odd_state(process.pid) == "is halted (SIGSTOP)", "nobody was woken up for it"


def test_without_the_program_that_reads_stacks_it_says_so(process, tmp_path, monkeypatch):
    monkeypatch.setattr(stacks.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    dump_stacks({"rank 0": ProcessRef.of(process.pid)}, tmp_path / "stacks.txt")
    assert "(py-spy is not installed)" in (tmp_path / "stacks.txt").read_text()


def test_a_process_that_has_ended_and_a_program_that_fails_are_said_too(process, tmp_path, monkeypatch):
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho cannot read it >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(stacks.sys, "executable", str(tmp_path / "python"))
    ref = ProcessRef.of(process.pid)
    dump_stacks({"rank 0": ref}, tmp_path / "stacks.txt")
    assert "cannot read it" in (tmp_path / "stacks.txt").read_text()
    process.kill()
    process.wait()
    dump_stacks({"rank 0": ref}, tmp_path / "stacks.txt")
    assert "(it has ended)" in (tmp_path / "stacks.txt").read_text()
