"""Tests that a process is identified by more than its pid, which the kernel may reuse."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from trainer.contract.process import ProcessRef, boot_id, parent_of, state_of


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_running_child_is_found_and_alive(sleeper: subprocess.Popen[bytes]) -> None:
    process = ProcessRef.of(sleeper.pid)
    assert process is not None
    assert process == ProcessRef.of(sleeper.pid)
    assert process.boot_id == boot_id()
    assert process.is_alive()


def test_the_current_process_is_alive() -> None:
    assert ProcessRef.current().pid == os.getpid()
    assert ProcessRef.current().is_alive()


def test_a_zombie_counts_as_gone(sleeper: subprocess.Popen[bytes], eventually: Callable[..., None]) -> None:
    process = ProcessRef.of(sleeper.pid)
    assert process is not None
    assert process.send(signal.SIGKILL)
    eventually(lambda: not process.is_alive())
    assert Path(f"/proc/{sleeper.pid}").exists()  # a zombie still has an entry in /proc
    assert ProcessRef.of(sleeper.pid) is None
    assert not process.send(signal.SIGTERM)


def test_an_ended_process_is_gone(sleeper: subprocess.Popen[bytes]) -> None:
    process = ProcessRef.of(sleeper.pid)
    assert process is not None
    sleeper.kill()
    sleeper.wait()
    assert not process.is_alive()
    assert ProcessRef.of(sleeper.pid) is None
    assert not process.send(signal.SIGKILL)


@pytest.mark.parametrize("changes", [{"start_ticks": 1}, {"boot_id": "before the restart"}])
def test_another_process_with_the_same_pid_is_never_signalled(
    sleeper: subprocess.Popen[bytes], changes: dict[str, object]
) -> None:
    process = ProcessRef.of(sleeper.pid)
    assert process is not None
    old = msgspec.structs.replace(process, **changes)
    assert not old.is_alive()
    assert not old.send(signal.SIGKILL)
    # Signals are delivered in order, so if SIGKILL had been sent, the process would be dead by now.
    assert process.send(signal.SIGSTOP)
    assert process.is_alive()
    assert sleeper.poll() is None


def test_a_process_stored_by_an_older_version_is_recognised_as_alive(sleeper: subprocess.Popen[bytes]) -> None:
    process = ProcessRef.of(sleeper.pid)
    assert process is not None
    old = msgspec.structs.replace(process, boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    # In a container, an old reference's pid may belong to a process outside the container.
    is_outside = os.stat("/proc/self/ns/pid").st_ino == 0xEFFFFFFC
    assert (old.is_alive(), old.is_elsewhere) == (is_outside, not is_outside)
    # Older versions also recognise a process stored by this version.
    assert (old == process) == is_outside


def test_a_process_in_another_pid_namespace_is_neither_alive_nor_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    process = ProcessRef.of(sleeper.pid)
    assert process is not None
    inside = msgspec.structs.replace(process, boot_id=process.boot_id.partition("/")[0] + "/1")
    assert (inside.is_elsewhere, inside.is_alive(), inside.send(signal.SIGKILL)) == (True, False, False)
    before = msgspec.structs.replace(process, boot_id="before the restart/1")
    assert (process.is_elsewhere, before.is_elsewhere) == (False, False)


def test_a_program_name_with_brackets_and_spaces_is_parsed(tmp_path: Path) -> None:
    odd = tmp_path / "a) Z 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "60"]) as process:
        ref = ProcessRef.of(process.pid)
        process.kill()
    assert ref is not None
    assert ref.start_ticks > 1


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1])
def test_an_impossible_pid_refers_to_no_process(pid: int) -> None:
    assert ProcessRef.of(pid) is None
    assert not ProcessRef(pid, 1, boot_id()).send(signal.SIGTERM)


def test_the_state_and_parent_of_a_process_are_returned(
    sleeper: subprocess.Popen[bytes], eventually: Callable[..., None]
) -> None:
    assert parent_of(sleeper.pid) == os.getpid()
    sleeper.send_signal(signal.SIGSTOP)
    eventually(lambda: state_of(sleeper.pid) == "T")
    sleeper.kill()
    sleeper.wait()
    assert (state_of(sleeper.pid), parent_of(sleeper.pid)) == ("", None)
