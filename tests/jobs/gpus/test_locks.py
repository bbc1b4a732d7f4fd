"""Tests for GPU locks on a machine where other users can create files in the lock folder."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sae_tui.jobs.gpus import locks as subject
from sae_tui.jobs.gpus.locks import ENV_LOCK_DIR, GpuLocks, HolderReader, lock_folder, lock_holders, lock_problem
from trainer.contract.locks import try_lock
from trainer.contract.paths import DataDir


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    made = DataDir(tmp_path / "data")
    made.create()
    return made


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENV_LOCK_DIR, str(tmp_path / "locks"))
    return tmp_path / "locks"


def test_a_lock_that_is_not_a_regular_file_is_rejected_at_once_and_its_owner_is_named(tmp_path: Path) -> None:
    (tmp_path / "sae-tui-GPU-0.lock").symlink_to("elsewhere")
    os.mkfifo(tmp_path / "sae-tui-GPU-1.lock")
    (tmp_path / "sae-tui-GPU-2.lock").mkdir()
    for uuid, reason in (("GPU-0", "it is a symbolic link"), ("GPU-1", "not a file"), ("GPU-2", "not a file")):
        locks = GpuLocks(tmp_path, ["GPU-3", uuid])
        assert not locks.take()
        assert (locks.refused, locks.descriptors) == (uuid, ())
        assert f"sae-tui-{uuid}.lock, owned by " in locks.why
        assert f"({reason}); ask " in locks.why
    assert GpuLocks(tmp_path, ["GPU-3"]).take()


def test_an_insecure_lock_folder_is_reported_and_the_data_folder_is_used_instead(
    data: DataDir, chosen: Path, tmp_path: Path
) -> None:
    assert lock_folder(data, "nvml") == chosen
    assert chosen.stat().st_mode & 0o7777 == 0o1777
    assert lock_problem(data, "nvml") == ""
    chosen.chmod(0o777)
    assert lock_folder(data, "nvml") == data.locks
    assert "must have mode 1777; other users cannot see GPU reservations" in lock_problem(data, "nvml")
    chosen.rmdir()
    chosen.touch()
    assert f"{chosen} is not a folder" in lock_problem(data, "nvml")
    chosen.unlink()
    chosen.symlink_to(tmp_path / "none" / "locks")
    assert f"{chosen} is not a folder" in lock_problem(data, "nvml")
    # Jobs without real GPUs do not use this folder.
    assert (lock_folder(data, "none"), lock_problem(data, "none")) == (data.locks, "")


def test_the_machines_lock_folder_must_belong_to_root_and_be_writable_by_all(
    data: DataDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_LOCK_DIR, raising=False)
    closed = tmp_path / "closed"
    closed.mkdir(0o755)
    monkeypatch.setattr(subject, "_MACHINE_FOLDERS", (closed, Path("/tmp")))
    assert (lock_folder(data, "nvml"), lock_problem(data, "nvml")) == (Path("/tmp"), "")
    monkeypatch.setattr(subject, "_MACHINE_FOLDERS", (closed,))
    assert lock_folder(data, "nvml") == data.locks
    assert f"neither {closed} is owned by root" in lock_problem(data, "nvml")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a folder")
def test_another_users_lock_folder_is_not_trusted(
    data: DataDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_LOCK_DIR, raising=False)
    taken = tmp_path / "lock"
    taken.mkdir()
    taken.chmod(0o1777)
    monkeypatch.setattr(subject, "_MACHINE_FOLDERS", (taken,))
    assert lock_folder(data, "nvml") == taken
    os.chown(taken, 12345, 12345)
    assert lock_folder(data, "nvml") == data.locks


def test_a_lock_file_removed_while_being_locked_reserves_no_gpu(tmp_path: Path, monkeypatch) -> None:
    first, second = GpuLocks(tmp_path, ["GPU-0"]), GpuLocks(tmp_path, ["GPU-0"])

    def remove_and_lock(descriptor: int, *, shared: bool) -> bool:
        (file,) = tmp_path.iterdir()
        file.unlink()
        return try_lock(descriptor, shared=shared)

    with monkeypatch.context() as patch:
        patch.setattr(subject, "try_lock", remove_and_lock)
        assert not first.take()
        assert first.why == ""
    assert second.take()
    assert not first.take()
    second.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a second file system")
def test_a_lock_with_the_same_inode_on_another_file_system_reserves_no_gpu(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True)
        if done.returncode:
            pytest.skip("this container cannot mount file systems")
    try:
        mine, theirs = one / "sae-tui-GPU-0.lock", other / "unrelated"
        mine.touch()
        theirs.touch()
        assert mine.stat().st_ino == theirs.stat().st_ino
        with theirs.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert lock_holders(one, ["GPU-0"]) == {}
        with mine.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert lock_holders(one, ["GPU-0"]) == {"GPU-0": os.getpid()}
    finally:
        for folder in (one, other):
            subprocess.run(["umount", folder], check=True)


def test_a_lock_file_replaced_while_being_opened_has_only_one_holder(tmp_path: Path, monkeypatch) -> None:
    first, second = GpuLocks(tmp_path, ["GPU-0"]), GpuLocks(tmp_path, ["GPU-0"])
    open_lock = subject.open_lock

    def replaced(path: Path) -> int:
        monkeypatch.setattr(subject, "open_lock", open_lock)
        descriptor = open_lock(path)
        path.unlink()
        assert first.take()
        return descriptor

    monkeypatch.setattr(subject, "open_lock", replaced)
    assert not second.take()
    assert second.refused == "GPU-0"
    first.release()
    assert second.take()


def test_a_hanging_lock_folder_does_not_block_a_process_reading_the_lock_holders(tmp_path: Path, monkeypatch) -> None:
    gpu, reader = GpuLocks(tmp_path, ["GPU-0"]), HolderReader(tmp_path)
    assert gpu.take()
    assert reader.read(["GPU-0"]) == {"GPU-0": os.getpid()}
    answers, calls = threading.Event(), []

    def hang(*arguments: object) -> dict[str, int]:
        calls.append(arguments)
        answers.wait(60)
        return {}

    monkeypatch.setattr(subject, "lock_holders", hang)
    for _ in range(3):
        assert reader.read(["GPU-0"]) == {"GPU-0": os.getpid()}
    assert len(calls) == 1
    answers.set()
    reader._thread.join()
    assert reader.read(["GPU-0"]) == {}
    gpu.release()


def test_lock_holders_can_be_read_from_several_threads_at_once(tmp_path):
    reader = HolderReader(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(reader.read, [["GPU-0"]] * 2000)) == [{}] * 2000
