"""Tests for launching several jobs: all of them or none, in few transactions, and what remains after a failure."""

from __future__ import annotations

import os
import signal

import pytest

from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.revive import reconcile_and_revive
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.settings.command import Command, CommandJob
from trainer.contract.settings.job import Launch
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

CPU = Placement("cpu", (), 1)


def command(name: str, *argv: str) -> CommandJob:
    return CommandJob(name=name, command=Command(argv=list(argv or ("true",))), launch=Launch(gpus="cpu"))


def launch(box, jobs, start, **options) -> list[int]:
    pairs = [(job, CPU) for job in jobs]
    return launching.launch_all(box.data, pairs, gpu_source="none", start=start, **options)


def no_start(*_: object) -> None:
    pass


def test_many_jobs_are_recorded_in_one_transaction_before_any_of_them_starts(box, monkeypatch):
    monkeypatch.setattr(launching, "LONGEST_TRANSACTION_S", 60.0)
    seen: list[int] = []
    ids = launch(
        box, [command(f"job {n}") for n in range(30)], lambda data, job_id: seen.append(len(box.control.jobs()))
    )
    assert ids == list(range(1, 31))
    assert seen == [30] * 30
    for job_id in ids:
        paths = box.data.run(job_id)
        assert paths.job_file.read_text() == box.job(job_id).config
        assert (paths.root / "environment.json").stat().st_mode & 0o777 == 0o600


def test_no_job_is_recorded_if_one_cannot_run(box):
    box.make_store()
    with pytest.raises(JobFileError, match="there is no program no-such-program"):
        launch(box, [command("good"), command("bad", "no-such-program")], no_start)
    assert box.control.jobs() == []
    assert not box.data.run(1).root.exists()


def test_every_job_in_an_array_knows_the_id_of_the_arrays_first_job(box):
    box.record()
    ids = launch(box, [command("a"), command("b")], no_start, as_array=True, at_once=1)
    assert ids == [2, 3]
    for job_id in ids:
        assert (box.job(job_id).array, box.job(job_id).array_limit) == (2, 1)
        assert "SAE_TUI_ARRAY_ID=2" in box.data.run(job_id).job_file.read_text()


def test_jobs_that_cannot_be_recorded_leave_nothing_behind_and_earlier_jobs_are_named(box, monkeypatch):
    # Each job gets its own transaction.
    monkeypatch.setattr(launching, "LONGEST_TRANSACTION_S", 0.0)

    def block_later(data, job_id: int) -> None:
        if job_id == 2:
            data.trash.symlink_to("/nowhere")

    with pytest.raises(UserError, match=r"is a symbolic link.*; already launched: job 1 and job 2$"):
        launch(box, [command(f"job {n}") for n in range(4)], block_later)
    assert [job.id for job in box.control.jobs()] == [2, 1]


def test_a_failure_in_a_transaction_undoes_the_files_and_rows_of_all_its_jobs(box, monkeypatch):
    monkeypatch.setattr(launching, "LONGEST_TRANSACTION_S", 60.0)
    write = launching.write_own

    def full_disk(path, content) -> None:
        if path == box.data.run(3).job_file:
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(launching, "write_own", full_disk)
    with pytest.raises(UserError, match=r"^the job cannot be recorded in .*: No space left on device$"):
        launch(box, [command(f"job {n}") for n in range(4)], no_start)
    assert box.control.jobs() == []
    assert [box.data.run(job_id).root.exists() for job_id in (1, 2, 3)] == [False, False, False]


def test_no_row_is_stored_before_its_files_are_on_disk(box, monkeypatch):
    synced: dict[str, int] = {}

    def fsync(descriptor: int) -> None:
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = len(box.control.jobs())

    box.make_store()
    monkeypatch.setattr(os, "fsync", fsync)
    ids = launch(box, [command("a"), command("b")], no_start)
    for job_id in ids:
        root = box.data.run(job_id).root
        for path in (root, *(root / name for name in ("job.toml", "environment.json", "record.json"))):
            assert synced[str(path)] == 0
    assert len(box.control.jobs()) == 2


def test_no_job_is_recorded_if_its_files_cannot_be_synced_to_disk(box, monkeypatch):
    box.make_store()

    def fsync(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match=r"^the job cannot be recorded in .*: Input/output error$"):
        launch(box, [command("a"), command("b")], no_start)
    assert box.control.jobs() == []
    assert not box.data.run(1).root.exists()


def test_jobs_stay_queued_until_the_next_command_if_the_queue_process_cannot_start(box):
    box.make_store()
    log = box.data.root / "queue.log"
    log.mkdir()
    with pytest.raises(launching.NotStarted, match=r"^job 1, job 2 and job 3 are queued, but the queue could not be"):
        launch(box, [command(f"job {n}") for n in range(3)], None)
    assert [job.state for job in box.control.jobs()] == [JobState.QUEUED] * 3
    log.rmdir()
    reconcile_and_revive(box.data)
    assert [box.wait_ended(job_id).state for job_id in (1, 2, 3)] == [JobState.FINISHED] * 3


def test_launching_many_jobs_checks_for_the_queue_process_only_once(box, monkeypatch):
    looks = []
    monkeypatch.setattr(launching.detach, "is_held", lambda path: looks.append(path) or True)
    launch(box, [command(f"job {n}") for n in range(20)], None)
    assert len(looks) == 1


def test_a_killed_launch_leaves_no_job_without_files(box, monkeypatch):
    box.make_store()
    pid = os.fork()
    if pid == 0:
        write = launching.write_record

        def killed(paths, row) -> None:
            if row.id == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            write(paths, row)

        launching.write_record = killed
        try:
            launch(box, [command(f"job {n}") for n in range(5)], no_start)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    control = Control(box.data.control_db)
    assert all(box.data.run(job.id).job_file.exists() for job in control.jobs())
    control.close()
    # The folders left by the killed process are not reused.
    (job_id,) = launch(box, [command("next")], no_start)
    assert job_id == 4
