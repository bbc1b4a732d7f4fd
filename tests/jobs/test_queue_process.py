"""Tests for the queue process, which waits on behalf of all of a user's queued jobs and can be killed at any time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from sae_tui.jobs import detach, edits, queue_process
from sae_tui.jobs.launch.resume import resume
from sae_tui.jobs.program_environment import snapshot
from sae_tui.jobs.queue_process import QueueProcess
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.user import user_name
from sae_tui.jobs.view.reader import JobsReader
from trainer.contract.errors import UserError
from trainer.contract.process import ProcessRef
from trainer.contract.store.states import JobState

ENDLESS = "steps=100000"


def restart_of_the_machine(box) -> None:
    """Kill the queue process and the processes of all jobs, and set the stored boot ids to an earlier boot."""
    jobs = box.control.active_jobs()
    ranks = [rank.process for job in jobs for rank in box.control.ranks(job.id)]
    for process in (box.queue_process(), *(job.supervisor for job in jobs), *ranks):
        if process:
            process.send(signal.SIGKILL)
            box.wait_for(lambda process=process: not process.is_alive(), "a process to be gone")
    for table in ("jobs", "ranks"):
        box.control._db.execute(f"UPDATE {table} SET boot_id = 'before-the-restart'")


def test_queued_jobs_have_no_process_of_their_own_and_run_in_order(box):
    box.start_queue()
    first, second, third = (box.enqueue(name, gpus=(0,)) for name in ("steps=450", "steps=2", "steps=2"))
    box.wait_steps(first)
    box.wait_for(lambda: box.job(third).waits_for, "the reason for waiting")
    assert box.job(second).waits_for.startswith(f"GPU 0 is held by job {first}")
    # The next job's supervisor may already have been started.
    assert box.job(third).supervisor is None
    assert box.wait_ended(third).started >= box.job(second).ended >= box.job(first).ended
    assert [box.job(job_id).state for job_id in (first, second, third)] == [JobState.FINISHED] * 3


def test_killing_the_queue_process_at_any_time_loses_no_job(box):
    queue = box.start_queue()
    jobs = [box.enqueue("steps=5", gpus=(0,)) for _ in range(6)]
    for delay_s in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5):
        time.sleep(delay_s)
        queue.send(signal.SIGKILL)
        box.wait_for(lambda queue=queue: not queue.is_alive(), "the queue process to be gone")
        assert all(box.job(job_id).state != JobState.LOST for job_id in jobs)
        queue = box.start_queue()
    ended = [box.wait_ended(job_id, timeout_s=60.0) for job_id in jobs]
    assert [job.state for job in ended] == [JobState.FINISHED] * 6
    assert [job.attempt for job in ended] == [1] * 6
    assert sorted(ended, key=lambda job: job.started) == ended


def test_any_command_starts_a_missing_queue_process(box):
    job_id = box.enqueue("steps=1", hold=True)
    assert box.queue_process() is None
    command = [sys.executable, "-m", "sae_tui", "gpus", "--gpu-source=simulated", f"--data-dir={box.data.root}"]
    subprocess.run(command, check=True, capture_output=True)
    box.wait_for(box.queue_process, "a queue process")
    box.wait_for(lambda: box.job(job_id).waits_for == "held", "the reason for waiting")
    edits.stop(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED
    assert box.data.run(job_id).exit_file.exists()


def test_only_one_queue_process_runs_for_a_user(box):
    box.make_store()
    queue = box.start_queue()
    assert QueueProcess(box.data).register() is False
    detach.start_detached([*detach.QUEUE, str(box.data.root)], box.data.root / "queue.log", "the queue")
    assert box.queue_process() == queue


def test_after_a_machine_restart_the_queue_continues_in_the_same_order(box):
    box.start_queue()
    runs = box.enqueue(ENDLESS)
    box.wait_steps(runs)
    after, held = box.enqueue("steps=1", after=(runs,)), box.enqueue("steps=1", hold=True)
    before = {job_id: box.job(job_id).queued for job_id in (after, held)}
    restart_of_the_machine(box)
    assert reconcile(box.data) == [runs]
    assert (box.job(runs).state, box.job(runs).error) == (JobState.LOST, "the machine was restarted")
    box.start_queue()
    waiting = f"comes after job {runs}, which was lost; resume job {runs}, or stop waiting for it: `sae-tui after"
    box.wait_for(lambda: (box.job(after).waits_for or "").startswith(waiting), "the reason for waiting")
    assert {job_id: box.job(job_id).queued for job_id in before} == before
    assert box.job(held).boot_id != "before-the-restart"
    longer = f"train.n_steps={box.job(runs).step + 50}"
    resume(box.data, runs, lambda _: box.placement(), [longer], start=lambda *_: None)
    assert box.wait_ended(after).started >= box.job(runs).ended
    edits.release(box.data, box.control, held)
    assert box.wait_ended(held).state == JobState.FINISHED


def test_a_queued_job_can_be_paused_released_and_stopped_without_a_supervisor(box):
    box.start_queue()
    first, second = box.enqueue(ENDLESS, gpus=(0,)), box.enqueue("steps=3", gpus=(0,))
    box.wait_steps(first)
    assert edits.pause(box.data, second) == f"job {second} is held until it is released"
    box.wait_for(lambda: box.job(second).held and not box.control.open_requests(second), "the hold")
    edits.release(box.data, box.control, second)
    box.wait_for(lambda: "held by job" in (box.job(second).waits_for or ""), "its place in the queue")
    edits.stop(box.data, second)
    assert box.wait_ended(second).state == JobState.STOPPED
    assert box.messages(second, "stopped") == ["stopped"]


def test_a_paused_jobs_supervisor_exits_and_leaves_the_job_to_the_queue_process(box):
    box.start_queue()
    job_id = box.enqueue("steps=450", gpus=(0,))
    supervisor = box.wait_steps(job_id).supervisor
    edits.pause(box.data, job_id)
    assert box.wait(job_id, JobState.QUEUED).held
    box.wait_for(lambda: not supervisor.is_alive(), "its supervisor to exit")
    edits.release(box.data, box.control, job_id)
    job = box.wait_ended(job_id)
    assert (job.state, job.attempt, job.step) == (JobState.FINISHED, 2, 450)


def test_a_job_requeued_by_its_supervisor_starts_as_soon_as_the_supervisor_has_exited(box):
    supervisor = subprocess.Popen(["sleep", "60"])
    started = []
    job_id = box.enqueue("steps=1")
    queue = QueueProcess(box.data, lambda _, job_id: started.append(job_id))
    ref = ProcessRef.of(supervisor.pid)
    box.control.update(job_id, supervisor_pid=ref.pid, supervisor_start=ref.start_ticks)
    queue._plan()
    assert started == []
    supervisor.kill()
    supervisor.wait()
    queue._is_due = False
    queue._wait()
    assert queue._is_due
    queue._plan()
    assert started == [job_id]


def test_a_queued_job_whose_run_folder_is_deleted_fails(box, monkeypatch):
    monkeypatch.setattr(queue_process, "READ_EVERY_S", 0.0)
    job_id = box.enqueue("steps=2", hold=True)
    queue = QueueProcess(box.data)
    queue._plan()
    box.data.run(job_id).root.rename(box.data.root / "elsewhere")
    assert queue._has_news()
    queue._plan()
    assert (box.job(job_id).state, box.job(job_id).error) == (JobState.FAILED, "its run folder was deleted")


def test_if_the_store_is_deleted_rows_of_queued_jobs_are_restored_with_later_edits(box):
    box.start_queue()
    job_id = box.enqueue("steps=5", hold=True, tags=("mine",))
    box.wait_for(lambda: box.job(job_id).waits_for == "held", "the reason for waiting")
    edits.rename(box.data, box.control, job_id, "another name")
    edits.prioritise(box.data, box.control, job_id, 9)
    box.control.close()
    del box._control
    for file in box.data.root.glob("control.db*"):
        file.unlink()
    box.wait_for(lambda: box.data.control_db.exists() and box.control.state(job_id) is not None, "its row")
    after = box.job(job_id)
    assert (after.name, after.priority, after.tags, after.held) == ("another name", 9, ("mine",), True)
    edits.release(box.data, box.control, job_id)
    assert box.wait_ended(job_id).state == JobState.FINISHED


@pytest.mark.usefixtures("no_forks")
def test_a_job_starts_in_the_environment_of_its_launch_rather_than_that_of_the_queue(box, monkeypatch):
    box.start_queue()
    monkeypatch.setenv("OF_THE_LAUNCH", "yes")
    job_id = box.enqueue(ENDLESS)
    box.wait_steps(job_id)
    assert b"OF_THE_LAUNCH" not in environ_of(box.queue_process().pid)
    assert environ_of(box.job(job_id).supervisor.pid)[b"OF_THE_LAUNCH"] == b"yes"
    (rank,) = box.living(job_id)
    assert environ_of(rank)[b"OF_THE_LAUNCH"] == b"yes"
    assert (box.data.run(job_id).root / "environment.json").stat().st_mode & 0o777 == 0o600


def environ_of(pid: int) -> dict[bytes, bytes]:
    with open(f"/proc/{pid}/environ", "rb") as stream:
        return dict(entry.split(b"=", 1) for entry in stream.read().split(b"\0") if b"=" in entry)


def test_a_stored_environment_is_complete_even_if_it_is_not_utf_8():
    assert (b"A", b"\xff") in snapshot({b"A": b"\xff"}).variables
    assert dict(snapshot({b"A": b"1", b"HOME": b"/h"}, clean=True).variables) == {
        b"HOME": b"/h", b"PATH": b"/usr/local/bin:/usr/bin:/bin",
    }  # fmt: skip


def test_the_queue_process_exits_once_it_has_no_jobs_and_another_one_can_take_over(box, monkeypatch):
    monkeypatch.setattr(queue_process, "LEAVES_AFTER_S", 0.0)
    box.make_store()
    queue = QueueProcess(box.data)
    assert queue.register()
    queue.run()
    assert QueueProcess(box.data).register()


def test_the_queue_process_stays_if_a_job_is_recorded_just_before_it_exits(box, monkeypatch):
    monkeypatch.setattr(queue_process, "LEAVES_AFTER_S", 0.0)
    box.make_store()
    queue = QueueProcess(box.data)
    assert queue.register()
    box.enqueue("steps=1", hold=True)
    assert not queue._is_done()
    assert not QueueProcess(box.data).register()


def test_an_idle_queue_process_does_not_hide_the_loss_of_the_store_by_recreating_it(box):
    job_id = box.enqueue("steps=1", hold=True)
    queue = QueueProcess(box.data)
    queue._plan()
    assert box.control.transition(job_id, JobState.FAILED)
    queue._plan()
    for file in box.data.root.glob("control.db*"):
        file.unlink()
    queue.run()
    assert not box.data.control_db.exists()
    assert "the job list is missing" in JobsReader(box.data).problem


def test_a_job_whose_supervisor_cannot_start_waits_with_the_reason_and_is_not_retried_at_once(box, capfd):
    tried = []

    def fails(_, job_id: int) -> None:
        tried.append(job_id)
        raise UserError("no process can be made")

    job_id = box.enqueue("steps=1")
    queue = QueueProcess(box.data, fails)
    queue._plan()
    queue._plan()
    assert tried == [job_id]
    assert box.job(job_id).waits_for == "its supervisor cannot be started: no process can be made"
    assert box.job(job_id).state == JobState.QUEUED


@pytest.mark.timeout(20)
def test_a_supervisor_that_could_not_start_is_started_again_although_the_queue_stays_the_same(box, monkeypatch):
    monkeypatch.setattr(queue_process, "AGAIN_S", 0.1)
    monkeypatch.setattr(queue_process, "PLAN_EVERY_S", 1e6)
    tried = []

    def fails_once(_, job_id: int) -> None:
        tried.append(job_id)
        if len(tried) == 1:
            raise UserError("no process can be made")

    job_id = box.enqueue("steps=1")
    queue = QueueProcess(box.data, fails_once)
    queue._plan()
    queue._has_news()  # the reason for waiting was recorded
    while len(tried) < 2:
        if queue._has_news():
            queue._plan()
    assert tried == [job_id, job_id]


def test_other_users_jobs_are_left_to_their_own_queue_processes(box):
    box.enqueue("steps=1")
    box.control._db.execute("UPDATE jobs SET user = 'another-user'")
    started = []
    QueueProcess(box.data, lambda _, job_id: started.append(job_id))._plan()
    assert started == []
    assert reconcile(box.data, lambda _: started.append(0)) == started == []


def test_a_queued_job_needs_no_revival_while_its_users_queue_process_holds_the_lock(box):
    job_id = box.enqueue("steps=1", hold=True)
    revived = []
    assert reconcile(box.data, revived.append) == []
    assert revived == [box.data]
    box.start_queue()
    assert reconcile(box.data, revived.append) == []
    assert revived == [box.data]
    assert box.job(job_id).state == JobState.QUEUED


def test_the_queue_lock_is_touched_so_that_other_hosts_see_that_the_queue_is_alive(box):
    box.make_store()
    lock = box.data.queue_lock(socket.gethostname(), user_name())
    queue = QueueProcess(box.data)
    assert queue.register()
    os.utime(lock, (1, 1))
    queue._sign()
    assert time.time() - lock.stat().st_mtime < 60


@pytest.mark.parametrize("change", ["jobs", "requests", "leases"])
def test_a_running_jobs_progress_does_not_trigger_replanning_but_a_change_does(box, change):
    running, queued = box.enqueue("steps=5", gpus=(0,)), box.enqueue("steps=5", gpus=(0,))
    box.control.lease(box.job(running), [(0, "GPU-0")])
    queue = QueueProcess(box.data, lambda *_: None)
    queue._has_news()
    queue._plan()
    box.control.update(running, step=3)
    assert not queue._has_news()
    if change == "jobs":
        edits.prioritise(box.data, box.control, queued, 3)
    elif change == "requests":
        box.control.request(queued, "stop")
    else:
        box.control.transition(running, JobState.FINISHED)
    assert queue._has_news()
