"""Tests for the queue: held jobs, dependencies, priorities, and a store deleted while jobs are waiting."""

from __future__ import annotations

import fcntl
import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import command_file

from sae_tui.jobs import edits
from sae_tui.jobs.gpus.locks import GpuLocks, lock_holders
from sae_tui.jobs.queue.after import waiting_for
from sae_tui.jobs.queue.waiting_job import QueueEntry
from sae_tui.jobs.upkeep import trash
from sae_tui.jobs.upkeep.repair import repair
from trainer.contract.errors import UserError
from trainer.contract.process import ProcessRef
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

ENDLESS = "steps=100000"


def in_line(box, **fields) -> int:
    """Record a queued job supervised by this process."""
    me = ProcessRef.current()
    identity = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}
    fields = {"gpu_ids": (0,), "gpu_uuids": ("GPU-0",), "gpus_wanted": 1} | identity | fields
    job_id = box.record(**fields)
    box.data.run(job_id).create()
    return job_id


def tries(box, job_id: int) -> str | None:
    """Try to start a job; return the reason why it waits, or None if it has started."""
    control = Control(box.data.control_db)
    line = QueueEntry(box.data, control, control.job(job_id))
    started = line.try_start()
    line.locks.release()
    control.close()
    return None if started else box.job(job_id).waits_for


def test_a_held_job_waits_for_its_release_and_does_not_block_others(box):
    held, other = in_line(box, held=True), in_line(box)
    assert tries(box, held) == "held"
    assert tries(box, other) is None
    box.control.transition(other, JobState.FINISHED)
    edits.release(box.data, box.control, held)
    assert tries(box, held) is None


def test_a_job_starts_once_all_its_dependencies_have_finished(box):
    first, second = in_line(box, gpu_uuids=("GPU-1",)), in_line(box, gpu_uuids=("GPU-2",))
    last = in_line(box, after=(first, second))
    assert tries(box, last) == f"comes after job {first}, which is queued"
    for job_id in (first, second):
        box.control.transition(job_id, JobState.STARTING)
        assert f"comes after job {job_id}, which is starting" == tries(box, last)
        box.control.transition(job_id, JobState.FINISHED)
    assert tries(box, last) is None


@pytest.mark.parametrize(("state", "word"), [("failed", "failed"), ("stopped", "was stopped"), ("lost", "was lost")])
def test_a_job_that_depends_on_an_unsuccessful_job_waits_for_the_user_but_blocks_no_job(box, state, word):
    first = in_line(box, gpu_uuids=("GPU-1",))
    second, other = in_line(box, after=(first,)), in_line(box)
    box.control.transition(first, JobState(state))
    remedy = f"resume job {first}, or stop waiting for it: `sae-tui after {second}`"
    assert tries(box, second) == f"comes after job {first}, which {word}; {remedy}"
    assert tries(box, other) is None
    box.control.transition(other, JobState.FINISHED)
    edits.release(box.data, box.control, second)
    assert tries(box, second) == f"comes after job {first}, which {word}; {remedy}"
    edits.come_after(box.data, box.control, second, [])
    assert tries(box, second) is None


def test_a_job_that_depends_on_a_failed_command_waits_until_the_command_runs_again(box):
    first = in_line(box, gpu_uuids=("GPU-1",), config=command_file("sh"))
    second = in_line(box, after=(first,))
    box.control.transition(first, JobState.FAILED)
    assert tries(box, second).startswith(f"comes after job {first}, which failed; run job {first} again, or stop")


def test_a_held_job_with_a_dependency_shows_and_keeps_both_reasons_for_waiting(box):
    first = in_line(box, gpu_uuids=("GPU-1",))
    second = in_line(box, after=(first,), held=True)
    assert tries(box, second) == f"held; comes after job {first}, which is queued"
    edits.release(box.data, box.control, second)
    assert tries(box, second) == f"comes after job {first}, which is queued"
    edits.hold(box.data, box.control, first)
    assert tries(box, second) == f"comes after job {first}, which is held"


def test_a_job_that_depends_on_a_deleted_job_starts_only_if_that_job_had_finished(box):
    finished, failed = in_line(box), in_line(box)
    second, third = in_line(box, after=(finished,)), in_line(box, after=(finished, failed))
    box.control.transition(finished, JobState.STARTING)
    box.control.transition(finished, JobState.FINISHED)
    box.control.transition(failed, JobState.FAILED)
    warning = f"job {third} comes after job {failed} and would no longer start automatically"
    assert waiting_for(box.control.jobs(), [finished, failed]) == warning
    assert waiting_for(box.control.jobs(), [finished]) == ""
    trash.throw_all_away(box.data, [finished, failed])
    remedy = f"stop waiting for it: `sae-tui after {third}`"
    assert tries(box, third) == f"comes after job {failed}, which was deleted before it had finished; {remedy}"
    assert tries(box, second) is None
    box.control.transition(second, JobState.FINISHED)
    trash.put_back(box.data, failed)
    assert tries(box, third).startswith(f"comes after job {failed}, which failed; resume job {failed}")
    edits.come_after(box.data, box.control, third, [])
    assert tries(box, third) is None


def test_a_job_with_a_higher_priority_starts_first_even_if_the_priority_is_set_later(box):
    old, new = in_line(box), in_line(box)
    assert tries(box, new) == f"job {old} is ahead in the queue"
    edits.prioritise(box.data, box.control, new, 5)
    assert tries(box, old) == f"job {new} is ahead in the queue"
    assert tries(box, new) is None


def test_a_job_whose_row_is_deleted_while_it_starts_fails_without_a_crash(box):
    job_id = in_line(box)
    control = Control(box.data.control_db)
    line = QueueEntry(box.data, control, control.job(job_id))
    original = line._plan._gpus

    def deleted_meanwhile(*arguments):
        box.control.transition(job_id, JobState.STOPPED)
        box.control.forget(job_id)
        return original(*arguments)

    line._plan._gpus = deleted_meanwhile
    assert not line.try_start()
    assert line.locks.descriptors == ()
    with pytest.raises(UserError, match="there is no job"):
        line.try_start()
    control.close()


def test_real_jobs_run_in_the_order_of_their_dependencies(box):
    first = box.launch("steps=30")
    second = box.launch("steps=2", place={"after": (first,)})
    third = box.launch("steps=2", place={"after": (second,), "hold": True})
    assert box.wait_ended(second).started >= box.job(first).ended
    edits.release(box.data, box.control, third)
    assert box.wait_ended(third).state == JobState.FINISHED
    with pytest.raises(UserError, match="there is no job 99"):
        box.launch("steps=2", place={"after": (99,)})


def test_a_queued_job_whose_run_folder_is_deleted_fails(box):
    job_id = box.launch("steps=2", place={"hold": True})
    for file in sorted(box.data.run(job_id).root.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    box.data.run(job_id).root.rmdir()
    job = box.wait_ended(job_id)
    assert (job.state, job.error) == (JobState.FAILED, "its run folder was deleted")


# In the following tests, the store is deleted while a job waits.


def delete_store(box) -> None:
    box.control.close()
    del box._control
    for file in box.data.root.glob("control.db*"):
        file.unlink()


def listed(box, job_id: int) -> bool:
    return box.data.control_db.exists() and box.control.state(job_id) is not None


def test_queued_jobs_restore_their_rows_with_later_edits(box):
    job_id = box.launch("steps=5", place={"hold": True, "tags": ("mine",)})
    edits.rename(box.data, box.control, job_id, "another name")
    edits.prioritise(box.data, box.control, job_id, 9)
    before = box.job(job_id)
    delete_store(box)
    box.wait_for(lambda: listed(box, job_id), "its row to be restored")
    after = box.job(job_id)
    assert (after.name, after.priority, after.tags, after.held) == ("another name", 9, ("mine",), True)
    assert (after.state, after.created, after.supervisor) == (JobState.QUEUED, before.created, before.supervisor)
    edits.release(box.data, box.control, job_id)
    assert box.wait_ended(job_id).state == JobState.FINISHED


def test_a_running_job_restores_its_row_and_its_leases(box):
    job_id = box.launch(ENDLESS, gpus=(0, 1))
    box.wait_steps(job_id, rank_count=2)
    edits.write_note(box.data, box.control, job_id, "keep an eye on it")
    delete_store(box)
    box.wait_for(lambda: listed(box, job_id), "its row to be restored")
    job = box.wait(job_id, JobState.RUNNING)
    assert job.note == "keep an eye on it"
    assert {lease.gpu_uuid for lease in box.control.leases()} == {"GPU-0", "GPU-1"}
    assert len(box.messages(job_id, "restored")) == 1
    box.wait_for(lambda: len(box.living(job_id)) == 2, "its ranks to be known again")
    edits.stop(box.data, job_id)
    job = box.wait_ended(job_id)
    assert (job.state, job.step > 0) == (JobState.STOPPED, True)
    assert box.control.leases() == []


def test_a_job_does_not_start_if_the_failed_job_it_depends_on_is_missing_from_the_store(box):
    first = box.launch("steps=10 fail=0@3")
    assert box.wait_ended(first).state == JobState.FAILED
    second = box.launch("steps=2", place={"after": (first,)})
    delete_store(box)
    box.wait_for(lambda: listed(box, second), "its row to be restored")
    wanted = f"comes after job {first}, which is not in the list; `sae-tui repair` restores it"
    box.wait_for(lambda: box.job(second).waits_for == wanted or box.job(second).state.is_final, "why it waits")
    assert box.job(second).state == JobState.QUEUED
    assert len(list(repair(box.data))) == 1
    box.wait_for(lambda: "which failed" in (box.job(second).waits_for or ""), "what the repair has found")


def test_a_new_job_never_gets_the_number_of_a_job_missing_from_the_store(box):
    first = box.launch("steps=1")
    box.wait_ended(first)
    delete_store(box)
    assert box.launch("steps=1") == first + 1


def test_a_lock_that_cannot_be_opened_makes_a_job_wait_without_holding_other_gpus(box):
    box.data.create()
    lock = box.data.locks / "sae-tui-GPU-1.lock"
    lock.symlink_to("elsewhere")
    job_id = box.launch("steps=1", gpus=(0, 1))
    message = f"GPU 1 cannot be reserved: {lock}, owned by {getpass.getuser()}, cannot be used (it is a symbolic link)"
    box.wait_for(lambda: (box.job(job_id).waits_for or "").startswith(message), "the reason")
    assert box.job(job_id).supervisor.is_alive()
    other = GpuLocks(box.data.locks, ["GPU-0"])
    box.wait_for(other.take, "the lock to be free between two attempts")
    other.release()
    lock.unlink()
    assert box.wait_ended(job_id).state == JobState.FINISHED


def test_the_holder_of_a_lock_is_known_while_others_wait_for_it(tmp_path) -> None:
    path = tmp_path / "sae-tui-GPU-1.lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        wait = f"import fcntl; fcntl.flock(open({str(path)!r}), fcntl.LOCK_EX)"
        waiting = subprocess.Popen([sys.executable, "-c", wait])
        try:
            while not any(
                "->" in line and str(waiting.pid) in line for line in Path("/proc/locks").read_text().splitlines()
            ):
                assert waiting.poll() is None
            assert lock_holders(tmp_path, ["GPU-1"]) == {"GPU-1": os.getpid()}
        finally:
            waiting.kill()
            waiting.wait()
