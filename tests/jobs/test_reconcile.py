"""Tests for jobs whose supervisor has disappeared without recording how the job ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import types

import pytest
from support.commands import command_file

from sae_tui.jobs import mending
from sae_tui.jobs.ending import JobEnding, write_ending
from sae_tui.jobs.mending import ORPHANS_S
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.upkeep.trash import throw_away
from sae_tui.jobs.user import user_name
from trainer.contract.errors import UserError
from trainer.contract.process import ProcessRef, boot_id
from trainer.contract.runs.lock import RunLock, is_held, is_holder
from trainer.contract.runs.rank_spec import rank_command
from trainer.contract.store.rows import Rank
from trainer.contract.store.states import JobState


@pytest.fixture
def other_user():
    process = subprocess.Popen(["sleep", "600"])
    yield ProcessRef.of(process.pid)
    process.kill()
    process.wait()


def gone_process() -> ProcessRef:
    process = subprocess.Popen(["sleep", "600"])
    ref = ProcessRef.of(process.pid)
    process.kill()
    process.wait()
    return ref


def holding(paths) -> subprocess.Popen:
    """Start a process that holds a run's lock, as its ranks do."""
    with RunLock(paths.root) as lock:
        lock.share()
        return subprocess.Popen(["sleep", "600"], pass_fds=[lock.descriptor])


@pytest.fixture
def orphan(box):
    """Start a rank of job 1, whose supervisor has disappeared."""
    box.data.run(1).create()
    process = holding(box.data.run(1))
    yield ProcessRef.of(process.pid)
    process.kill()
    process.wait()


def supervised(ref: ProcessRef) -> dict:
    return {"supervisor_pid": ref.pid, "supervisor_start": ref.start_ticks, "boot_id": ref.boot_id}


def started(box, ref: ProcessRef, **fields) -> int:
    """Record a running job on GPU 0."""
    job_id = box.record(gpu_ids=(0,), gpu_uuids=("GPU-0",), **supervised(ref))
    box.data.run(job_id).create()
    assert box.control.lease(box.job(job_id), [(0, "GPU-0")], attempt=1)
    box.control.transition(job_id, JobState.RUNNING, **fields)
    return job_id


def add_rank(box, job_id: int, ref: ProcessRef, number: int = 0) -> None:
    row = Rank(job_id=job_id, attempt=1, rank=number, pid=ref.pid, start_ticks=ref.start_ticks, boot_id=ref.boot_id)
    box.control.record_rank(row)


def test_a_job_whose_supervisor_is_killed_is_lost_and_keeps_no_processes_or_leases(box):
    job_id = box.launch("steps=100000", gpus=(0, 1))
    box.wait_steps(job_id, rank_count=2)
    supervisor = box.job(job_id).supervisor
    supervisor.send(signal.SIGKILL)
    deadline = time.monotonic() + 15
    while not reconcile(box.data):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job = box.job(job_id)
    assert (job.state, job.error) == (JobState.LOST, f"its supervisor (pid {supervisor.pid}) disappeared")
    assert box.control.leases() == []
    # A dying process releases its locks and files shortly before it is gone.
    box.wait_for(lambda: box.living(job_id) == [], "the end of its ranks")


def test_the_queue_continues_after_a_crash_even_if_no_app_is_running(box):
    first = box.launch("steps=100000", gpus=(0,))
    box.wait_steps(first)
    second = box.launch("steps=1", gpus=(0,))
    box.job(first).supervisor.send(signal.SIGKILL)
    assert box.wait_ended(second).state == JobState.FINISHED
    assert box.job(first).state == JobState.LOST


def test_after_a_machine_restart_a_job_is_lost_and_no_process_is_signalled(box, other_user):
    before = ProcessRef(other_user.pid, other_user.start_ticks, "another-boot")
    job_id = started(box, before)
    add_rank(box, job_id, before)
    assert reconcile(box.data) == [job_id]
    assert (box.job(job_id).state, box.job(job_id).error) == (JobState.LOST, "the machine was restarted")
    assert other_user.is_alive()


def test_another_process_with_a_ranks_pid_is_never_signalled(box, other_user):
    reused = ProcessRef(other_user.pid, other_user.start_ticks - 1, boot_id())
    job_id = started(box, reused)
    add_rank(box, job_id, reused)
    box.control.add_event(job_id, "orphaned", "long ago")
    box.control._db.execute("UPDATE events SET timestamp = timestamp - ?", (2 * ORPHANS_S,))
    assert reconcile(box.data) == [job_id]
    assert box.job(job_id).error == f"its supervisor (pid {other_user.pid}) disappeared"
    assert other_user.is_alive()


def test_orphaned_ranks_get_a_minute_to_save_and_are_then_ended(box, orphan):
    job_id = started(box, gone_process())
    add_rank(box, job_id, orphan)
    assert reconcile(box.data) == []
    assert reconcile(box.data) == []
    assert [event.kind for event in box.control.events(job_id)] == ["orphaned"]
    assert orphan.is_alive()
    a_minute_later(box)
    reconcile(box.data)
    box.wait_for(lambda: not orphan.is_alive(), "the end of the rank")
    assert reconcile(box.data) == [job_id]
    assert box.control.leases() == []


def test_the_message_about_a_process_left_behind_by_a_command_promises_no_checkpoint(box, orphan):
    job_id = started(box, gone_process(), config=command_file("sh"))
    assert reconcile(box.data) == []
    assert box.messages(job_id, "orphaned") == ["its supervisor is gone; a process of its run is still alive"]


def test_a_forward_clock_jump_does_not_shorten_the_minute_given_to_orphaned_ranks(box, orphan, monkeypatch):
    job_id = started(box, gone_process())
    add_rank(box, job_id, orphan)
    box.data.run(job_id).attempt(box.job(job_id).attempt).mkdir(parents=True)
    assert reconcile(box.data) == []
    ahead = types.SimpleNamespace(**vars(time) | {"time": lambda: time.time() + 3600})
    with monkeypatch.context() as jumped:
        jumped.setattr(mending, "time", ahead)
        assert reconcile(box.data) == []
        assert orphan.is_alive()
        a_minute_later(box)
        reconcile(box.data)
    box.wait_for(lambda: not orphan.is_alive(), "the end of the rank")


def a_minute_later(box) -> None:
    box.control._db.execute("UPDATE events SET timestamp = timestamp - ?", (ORPHANS_S + 1,))


def test_a_process_without_the_lock_is_never_signalled_even_if_a_row_names_its_pid(box, other_user, orphan):
    # A user who can write to the job list can put any pid there.
    job_id = started(box, gone_process())
    add_rank(box, job_id, other_user)
    for _ in range(3):
        assert reconcile(box.data) == []
        a_minute_later(box)
    lock = box.data.run(job_id).lock_file
    assert box.messages(job_id, "not-ended") == [
        f"none of its recorded processes holds its run.lock; kill the process that `fuser {lock}` shows"
    ]
    # Signals are delivered in order, so an earlier signal would have ended the process by now.
    assert other_user.send(signal.SIGSTOP)
    assert other_user.is_alive()
    orphan.send(signal.SIGKILL)
    box.wait_for(lambda: reconcile(box.data) == [job_id], "the job to be lost")
    assert other_user.is_alive()


def test_without_usable_locks_only_a_rank_from_the_same_attempt_is_ended(box, tmp_path):
    # Otherwise, if another user replaced the lock file, an editor that has one of the run's files open would be killed.
    job_id = started(box, gone_process())
    paths = box.data.run(job_id)
    paths.lock_file.mkdir()
    log = paths.log(0)
    log.touch()
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").touch()  # so that Python imports this package instead of the real trainer
    (package / "__main__.py").write_text("import time; time.sleep(600)")
    command = rank_command(paths.rank_spec(1))
    with (
        subprocess.Popen(["tail", "-f", str(log)]) as reader,
        subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}) as rank,
        contextlib.ExitStack() as stack,
    ):
        # A failed assertion must not wait for the processes.
        stack.callback(reader.kill)
        stack.callback(rank.kill)
        reading = ProcessRef.of(reader.pid)
        add_rank(box, job_id, reading)
        add_rank(box, job_id, ProcessRef.of(rank.pid), number=1)
        for _ in range(2):
            assert reconcile(box.data) == []
            a_minute_later(box)
        reconcile(box.data)
        assert rank.wait(30) == -signal.SIGKILL
        assert reading.send(signal.SIGSTOP)
        assert reading.is_alive()


def test_a_process_that_only_has_the_lock_file_open_does_not_hold_the_lock(box, orphan):
    file = box.data.run(1).lock_file
    with file.open() as stream, subprocess.Popen(["sleep", "600"], pass_fds=[stream.fileno()]) as reader:
        holds = [is_holder(process, file) for process in (orphan, ProcessRef.of(reader.pid))]
        reader.kill()
    assert holds == [True, False]


def test_a_process_without_the_lock_does_not_keep_a_job_from_being_marked_as_lost(box, other_user):
    job_id = started(box, gone_process())
    add_rank(box, job_id, other_user)
    assert reconcile(box.data) == [job_id]
    assert other_user.is_alive()


def test_a_run_whose_lock_is_held_can_be_neither_resumed_nor_deleted(box, orphan):
    # An app in another PID namespace, which cannot see the processes, may have marked the job as lost.
    job_id = box.record(state=JobState.LOST, name="steps=1")
    for action in (lambda: box.resume(job_id), lambda: throw_away(box.data, job_id)):
        with pytest.raises(UserError, match=r"the run in .*/runs/1 is still running; stop it, wait until it has saved"):
            action()
    assert box.job(job_id).state == JobState.LOST


def test_the_end_of_a_job_is_read_from_its_file_if_the_store_lacks_it(box):
    job_id = started(box, gone_process())
    ending = JobEnding(JobState.FINISHED, 1234.5, output_path="/saes/1")
    write_ending(box.data.run(job_id).exit_file, ending)
    assert reconcile(box.data) == [job_id]
    job = box.job(job_id)
    assert (job.state, job.ended, job.output_path) == (JobState.FINISHED, 1234.5, "/saes/1")


def test_a_job_without_a_supervisor_names_its_deleted_run_folder_as_the_reason(box):
    job_id = started(box, gone_process())
    shutil.rmtree(box.data.run(job_id).root)
    assert reconcile(box.data) == [job_id]
    assert box.job(job_id).error == "its run folder was deleted"


def test_a_queued_job_without_a_supervisor_is_lost_after_half_a_minute(box):
    fresh, old = box.record(), box.record(queued=time.time() - 31)
    assert reconcile(box.data) == [old]
    assert box.job(old).error == "its supervisor never started"
    assert box.job(fresh).state == JobState.QUEUED


def test_jobs_on_other_machines_and_live_jobs_are_left_alone(box, other_user):
    started(box, other_user)
    box.record(host=f"not-{socket.gethostname()}", created=1.0)
    assert reconcile(box.data) == []


def test_reconciling_many_queued_jobs_checks_for_the_queue_process_only_once(box, monkeypatch):
    ids = [box.enqueue("steps=1", hold=True) for _ in range(20)]
    looks = []

    def look(path):
        looks.append(path)
        return is_held(path)

    monkeypatch.setattr("sae_tui.jobs.reconcile.is_held", look)
    queue = box.data.queue_lock(socket.gethostname(), user_name())
    assert reconcile(box.data) == []
    assert looks.count(queue) == 1
    assert {box.job(job_id).state for job_id in ids} == {JobState.QUEUED}


def test_reconciling_without_a_store_changes_nothing(box):
    assert reconcile(box.data) == []
    assert not box.data.root.exists()
