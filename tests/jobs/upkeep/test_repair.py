"""Tests that a deleted or corrupt store is restored from the run folders."""

from __future__ import annotations

import msgspec
import pytest

from sae_tui.jobs import edits
from sae_tui.jobs.ending import JobEnding
from sae_tui.jobs.record import read_record, write_record
from sae_tui.jobs.upkeep.repair import repair
from trainer.contract.runs.lock import RunLock, is_held
from trainer.contract.store.database import StoreError
from trainer.contract.store.metrics_store import SeriesReader
from trainer.contract.store.states import JobState


@pytest.fixture
def two_jobs(box) -> tuple[int, int]:
    """Run one job that finishes and one that fails."""
    ids = box.launch("steps=10", gpus=(0,)), box.launch("steps=10 fail=0@7", gpus=(1,))
    for job_id in ids:
        box.wait_ended(job_id)
    return ids


def forget_store(box) -> None:
    box.control.close()
    del box._control


def lost(box) -> None:
    forget_store(box)
    for file in box.data.root.glob("control.db*"):
        file.unlink()


def corrupt(box) -> None:
    box.control._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    forget_store(box)
    for file in box.data.root.glob("control.db-*"):
        file.unlink()
    content = bytearray(box.data.control_db.read_bytes())
    content[4096:12288] = b"\xa5" * 8192
    box.data.control_db.write_bytes(content)


def no_database(box) -> None:
    forget_store(box)
    for file in box.data.root.glob("control.db-*"):
        file.unlink()
    box.data.control_db.write_bytes(b"no database" * 1000)


@pytest.mark.parametrize("damage", [lost, corrupt, no_database])
def test_the_job_list_is_restored_completely(box, two_jobs, damage):
    before = [box.job(job_id) for job_id in two_jobs]
    damage(box)
    messages = list(repair(box.data))
    assert [box.job(job_id) for job_id in two_jobs] == before
    assert box.messages(two_jobs[0], "repaired") == ["its row was rebuilt from its run folder"]
    backups = list(box.data.root.glob("control.db.corrupt-1"))
    assert (len(backups), messages[0].startswith("control.db was corrupt; it is kept as")) == (
        (0, False) if damage is lost else (1, True)
    )
    assert [line for line in messages if "in the list again" in line] == [
        f"job {two_jobs[0]} (steps=10) is in the list again, finished",
        f"job {two_jobs[1]} (steps=10 fail=0@7) is in the list again, failed",
    ]
    assert list(repair(box.data)) == []


def test_a_job_without_its_record_is_reconstructed_from_its_job_file_and_exit_file(box, two_jobs):
    first, second = two_jobs
    box.data.run(first).record_file.unlink()
    box.data.run(second).record_file.write_text("{broken")
    (box.data.run(second).exit_file).unlink()
    lost(box)
    list(repair(box.data))
    job = box.job(first)
    assert (job.state, job.name, job.step, job.attempt, job.output_path) == (
        JobState.FINISHED, "steps=10", 10, 1, str(box.data.sae(first)),
    )  # fmt: skip
    job = box.job(second)
    assert (job.state, job.error) == (JobState.LOST, "its outcome is unknown: its store was lost")
    assert box.resume(second).step == 0
    edits.stop(box.data, second)
    assert box.wait_ended(second).state == JobState.STOPPED


def test_a_job_is_marked_as_ended_after_its_record_is_written_and_its_lock_released(box, monkeypatch):
    from sae_tui.jobs.supervisor.supervise import Supervisor

    job_id = box.record(waits_for="GPU 0 is held")
    paths = box.data.run(job_id)
    paths.create()
    supervisor = Supervisor(box.data, job_id)
    supervisor._lock = RunLock(paths.root)
    supervisor._lock.share()
    original, records = supervisor._control.transition, []

    def look(*arguments, **fields):
        records.append((read_record(paths), is_held(paths.lock_file)))
        return original(*arguments, **fields)

    monkeypatch.setattr(supervisor._control, "transition", look)
    supervisor._conclude(JobEnding(state=JobState.STOPPED, ended=1.0))
    assert records == [(box.job(job_id), False)]
    assert box.job(job_id).state == JobState.STOPPED


def test_a_folder_that_is_not_a_run_is_skipped(box, two_jobs):
    (box.data.root / "runs" / "77").mkdir()
    (box.data.root / "runs" / "notes").mkdir()
    lost(box)
    list(repair(box.data))
    assert {job.id for job in box.control.jobs()} == set(two_jobs)


def test_a_manually_copied_run_becomes_a_separate_job(box, two_jobs):
    record = read_record(box.data.run(two_jobs[0]))
    paths = box.data.run(30)
    paths.create()
    write_record(paths, msgspec.structs.replace(record, name="copy"))
    list(repair(box.data))
    assert (box.job(30).name, box.job(two_jobs[0]).name) == ("copy", "steps=10")


def test_a_running_job_is_restored_as_running_and_continues(box):
    job_id = box.launch("steps=100000", gpus=(0,))
    box.wait_steps(job_id)
    lost(box)
    list(repair(box.data))
    box.wait(job_id, JobState.RUNNING)
    assert [lease.gpu_uuid for lease in box.control.leases()] == ["GPU-0"]
    edits.stop(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED


def test_corrupt_metrics_are_kept_under_another_name(box, two_jobs):
    metrics = box.data.run(two_jobs[0]).metrics_db
    metrics.write_bytes(b"no database" * 1000)
    (message,) = repair(box.data)
    backup = metrics.with_name("metrics.db.corrupt-1")
    assert message == f"the metrics of job {two_jobs[0]} were corrupt; they are kept as {backup}"
    assert backup.read_bytes().startswith(b"no database")
    with pytest.raises(StoreError):
        SeriesReader(metrics)
    metrics.write_bytes(b"again" * 1000)
    list(repair(box.data))
    assert metrics.with_name("metrics.db.corrupt-2").exists()


def test_a_new_folder_needs_no_repair(box):
    assert list(repair(box.data)) == []
    assert box.control.jobs() == []


def test_run_files_that_are_not_text_are_skipped(box, two_jobs):
    first, second = map(box.data.run, two_jobs)
    first.record_file.write_bytes(b'{"name": "\xa5"}')
    second.exit_file.write_bytes(b'{"state": "\xa5"}')
    lost(box)
    list(repair(box.data))
    assert [box.job(job_id).state for job_id in two_jobs] == [JobState.FINISHED, JobState.FAILED]
