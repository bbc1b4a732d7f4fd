"""Tests for pausing jobs, which then return to the queue, and for resuming jobs that have ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from sae_tui.jobs import edits, supervisor_log
from sae_tui.jobs.ending import JobEnding
from sae_tui.jobs.gpus.locks import GpuLocks
from sae_tui.jobs.launch.clone import clone_settings
from sae_tui.jobs.launch.resume import prepare
from sae_tui.jobs.reconcile import reconcile
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.planning.workload import Layout
from trainer.contract.store.database import StoreError
from trainer.contract.store.states import JobState

ENDLESS = "steps=100000"
LONG = "steps=450"
STOPPED = JobEnding(state=JobState.STOPPED, ended=1.0)


def edit(box, what, job_id: int, *values: object) -> str:
    return what(box.data, box.control, job_id, *values)


def wait_paused(box, job_id: int):
    job = box.wait(job_id, JobState.QUEUED)
    assert job.held
    return job


def steps_made(box, job_id: int) -> list[str]:
    log = box.data.run(job_id).log(0).read_text()
    return [line for line in log.splitlines() if line.startswith("made")]


# Pause.


def test_a_job_that_is_paused_and_then_stopped_does_not_return_to_the_queue(box):
    job_id = box.record(state=JobState.STOPPING)
    box.control.request(job_id, "stop")
    assert not box.control.transition(job_id, JobState.QUEUED, unless=("stop", "kill"))
    assert (box.job(job_id).state, box.control.open_requests(job_id)) == (JobState.STOPPING, {"stop"})


def test_a_paused_job_releases_its_gpus_and_continues_after_its_release(box):
    job_id = box.launch(LONG, gpus=(0, 1), max_restarts=1)
    box.wait_steps(job_id, rank_count=2)
    message = f"job {job_id} saves a checkpoint at its next step and is paused; other jobs can then use its GPUs"
    assert edits.pause(box.data, job_id) == message
    paused = wait_paused(box, job_id)
    assert (paused.ended, paused.error, paused.attempt) == (None, None, 1)
    assert paused.step >= 5
    assert box.control.leases() == []
    locks = GpuLocks(box.data.locks, ["GPU-0", "GPU-1"])
    assert locks.take()
    locks.release()
    assert box.living(job_id) == []
    assert paused.supervisor.is_alive()
    edit(box, edits.release, job_id)
    job = box.wait_ended(job_id)
    assert (job.state, job.attempt, job.step) == (JobState.FINISHED, 2, 450)
    (made,) = steps_made(box, job_id)
    assert int(made.split()[3]) > 5
    assert [rank.exit_code for rank in box.control.ranks(job_id)] == [3, 3, 0, 0]


def test_a_paused_jobs_gpu_is_available_to_others(box):
    first = box.launch(ENDLESS, gpus=(0,))
    second = box.launch("steps=1", gpus=(0,))
    box.wait_steps(first)
    edits.pause(box.data, first)
    assert box.wait_ended(second).state == JobState.FINISHED
    assert box.job(first).state == JobState.QUEUED


def test_a_paused_job_can_be_stopped(box):
    job_id = box.launch(ENDLESS, gpus=(0,))
    box.wait_steps(job_id)
    edits.pause(box.data, job_id)
    wait_paused(box, job_id)
    assert edits.pause(box.data, job_id) == f"job {job_id} is already paused"
    assert edits.stop(box.data, job_id) == f"job {job_id} is removed from the queue"
    assert box.wait_ended(job_id).state == JobState.STOPPED
    assert json.loads(box.data.run(job_id).exit_file.read_text())["state"] == "stopped"


def test_a_stop_takes_precedence_over_a_pause(box):
    job_id = box.launch(ENDLESS)
    box.wait_steps(job_id)
    box.control.request(job_id, "pause")
    box.control.request(job_id, "stop")
    assert box.wait_ended(job_id).state == JobState.STOPPED


def test_a_job_that_is_being_stopped_cannot_be_paused(box):
    job_id = box.record()
    for state in (JobState.STARTING, JobState.RUNNING):
        box.control.transition(job_id, state)
    box.control.request(job_id, "stop")
    message = f"job {job_id} is being stopped; `sae-tui resume {job_id}` resumes it later"
    assert edits.pause(box.data, job_id) == message
    assert box.control.open_requests(job_id) == {"stop"}


def test_pausing_a_queued_job_holds_it_only_until_its_release(box):
    first = box.launch(ENDLESS, gpus=(0,))
    box.wait_steps(first)
    second = box.launch("steps=3", gpus=(0,))
    assert edits.pause(box.data, second) == f"job {second} is held until it is released"
    box.wait_for(lambda: box.job(second).held and not box.control.open_requests(second), "the hold")
    edit(box, edits.release, second)
    box.wait_for(lambda: "held by job" in (box.job(second).waits_for or ""), "its place in the queue")
    assert not box.job(second).held
    edits.stop(box.data, first)
    job = box.wait_ended(second)
    assert (job.state, job.attempt) == (JobState.FINISHED, 1)


def test_releasing_a_job_cancels_a_pause_that_its_supervisor_has_not_seen_yet(box):
    job_id = box.record(held=True)
    edits.pause(box.data, job_id)
    edit(box, edits.release, job_id)
    assert box.control.open_requests(job_id) == set()


def test_a_stop_that_arrives_just_after_the_ranks_paused_is_not_lost(box):
    # The supervisor checks for requests once more before it puts the job back in the queue.
    from sae_tui.jobs.supervisor.supervise import Supervisor

    job_id = box.record()
    box.data.run(job_id).create()
    supervisor = Supervisor(box.data, job_id)
    for state in (JobState.STARTING, JobState.STOPPING):
        box.control.transition(job_id, state)
    box.control.request(job_id, "pause")
    box.control.request(job_id, "stop")
    assert supervisor._queue_again(STOPPED, held=True) is STOPPED
    assert box.job(job_id).state == JobState.STOPPING


def test_a_pause_that_could_not_be_stored_when_requested_still_queues_the_job(box):
    from sae_tui.jobs.supervisor.supervise import Supervisor

    job_id = box.record()
    box.data.run(job_id).create()
    supervisor = Supervisor(box.data, job_id)
    for state in (JobState.STARTING, JobState.RUNNING):
        box.control.transition(job_id, state)
    box.control.request(job_id, "pause")
    assert supervisor._queue_again(STOPPED, held=True) is None
    assert (box.job(job_id).state, box.job(job_id).held) == (JobState.QUEUED, True)


def test_a_store_failure_after_a_paused_job_is_queued_leaves_it_in_the_queue(box, monkeypatch):
    from sae_tui.jobs.supervisor.supervise import Supervisor

    job_id = box.record()
    box.data.run(job_id).create()
    supervisor = Supervisor(box.data, job_id)
    for state in (JobState.STARTING, JobState.STOPPING):
        box.control.transition(job_id, state)
    add_event, failed = supervisor._control.add_event, []

    def fails_once(*arguments):
        if not failed:
            failed.append(arguments)
            raise StoreError("control.db is locked")
        add_event(*arguments)

    monkeypatch.setattr(supervisor._control, "add_event", fails_once)
    assert supervisor._queue_again(STOPPED, held=True) is None
    assert failed
    assert box.messages(job_id, "paused")
    assert (box.job(job_id).state, box.job(job_id).held) == (JobState.QUEUED, True)


def test_a_pause_that_cannot_be_recorded_ends_the_job_with_the_reason(box, monkeypatch):
    from sae_tui.jobs.supervisor.supervise import Supervisor

    monkeypatch.setattr(supervisor_log, "STORE_PAUSE_S", 0.0)
    job_id = box.record()
    box.data.run(job_id).create()
    supervisor = Supervisor(box.data, job_id)
    for state in (JobState.STARTING, JobState.RUNNING):
        box.control.transition(job_id, state)
    store, aside = box.data.control_db, box.data.root / "aside.db"
    store.rename(aside)
    store.mkdir()
    ending = supervisor._queue_again(STOPPED, held=True)
    why = f"the store {store} is not a plain file or has other hard links; remove it"
    reason = f"could not be queued again, so it is stopped: {why}"
    assert ending == msgspec.structs.replace(STOPPED, error=reason)
    store.rmdir()
    aside.rename(store)
    supervisor._conclude(ending)
    assert (box.job(job_id).state, box.job(job_id).error) == (JobState.STOPPED, reason)
    assert box.messages(job_id, "stopped") == [reason]


def test_a_job_is_paused_even_if_the_event_cannot_be_stored(box, monkeypatch):
    from sae_tui.jobs.supervisor.supervise import Supervisor

    monkeypatch.setattr(supervisor_log, "STORE_PAUSE_S", 0.0)
    job_id = box.record()
    box.data.run(job_id).create()
    supervisor = Supervisor(box.data, job_id)
    for state in (JobState.STARTING, JobState.STOPPING):
        box.control.transition(job_id, state)

    def fail(*_):
        raise StoreError("control.db is locked")

    monkeypatch.setattr(supervisor._control, "add_event", fail)
    assert supervisor._queue_again(STOPPED, held=True) is None
    assert (box.job(job_id).state, box.job(job_id).held) == (JobState.QUEUED, True)


# Resume.


def stopped(box, name: str = LONG, **options) -> int:
    job_id = box.launch(name, **options)
    box.wait_steps(job_id, rank_count=max(1, len(options.get("gpus", ()))))
    edits.stop(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED
    return job_id


def test_a_stopped_job_continues_from_its_checkpoint(box):
    job_id = stopped(box, gpus=(0,))
    plan = box.resume(job_id)
    assert plan.step >= 5
    assert box.messages(job_id, "resuming") == [f"resumes from step {plan.step}"]
    job = box.wait_ended(job_id)
    assert (job.state, job.attempt, job.error, job.gpu_ids) == (JobState.FINISHED, 2, None, (0,))
    assert steps_made(box, job_id) == [f"made the steps {plan.step + 1} to 450"]
    record = json.loads((box.data.run(job_id).attempt(1) / "exit.json").read_text())
    assert record["state"] == "stopped"


@pytest.mark.slow
def test_resuming_a_job_clears_earlier_requests(box):
    job_id = stopped(box)
    box.control.request(job_id, "kill")
    box.resume(job_id)
    assert box.control.open_requests(job_id) == set()
    assert box.wait_ended(job_id).state == JobState.FINISHED


@pytest.mark.slow
def test_a_job_continues_on_other_gpus_with_the_same_tokens_per_step(box):
    job_id = stopped(box, gpus=(0,))
    plan = box.resume(job_id, "launch.gpus=[1,2]", gpus=(1, 2))
    assert Layout(plan.config, 2).tokens_per_step == 64
    assert "a step still has 64 tokens" in plan.notes[0]
    job = box.wait_ended(job_id)
    assert (job.state, job.gpu_ids, job.world_size, job.distributed) == (JobState.FINISHED, (1, 2), 2, True)
    assert [rank.rank for rank in box.control.ranks(job_id) if rank.attempt == 2] == [0, 1]


def test_a_resumed_job_may_be_restarted_as_often_as_a_new_job(box):
    job_id = box.launch("steps=20 save=4 crash=0@6#1 crash=0@10#2 crash=0@14#3", max_restarts=1)
    failed = box.wait_ended(job_id)
    assert (failed.state, failed.attempt, failed.restarts) == (JobState.FAILED, 2, 1)
    assert box.resume(job_id).step == 8
    job = box.wait_ended(job_id)
    assert (job.state, job.attempt, job.restarts, job.error) == (JobState.FINISHED, 4, 1, None)


def test_a_lost_job_can_be_resumed(box):
    job_id = box.launch("steps=450 save=5")
    box.wait_steps(job_id)
    box.job(job_id).supervisor.send(9)
    box.wait_for(lambda: box.living(job_id) == [], "its ranks to save and exit")
    plan = box.resume(job_id)
    assert plan.step >= 5
    job = box.wait_ended(job_id)
    assert (job.state, job.attempt) == (JobState.FINISHED, 2)


def test_a_finished_job_can_be_resumed_only_with_more_steps(box):
    job_id = box.launch("steps=10")
    box.wait_ended(job_id)
    with pytest.raises(JobFileError, match=rf"train\.n_steps: job {job_id} has finished; train it for longer with"):
        box.resume(job_id)
    with pytest.raises(JobFileError, match=r"train\.n_steps: the run is already at step 10"):
        box.resume(job_id, "train.n_steps=5")
    assert box.job(job_id).state == JobState.FINISHED
    plan = box.resume(job_id, "train.n_steps=15")
    assert "the run ends at step 15 instead of 10" in plan.notes[0]
    job = box.wait_ended(job_id)
    assert (job.state, job.step, job.total_steps) == (JobState.FINISHED, 15, 15)
    assert steps_made(box, job_id)[1] == "made the steps 11 to 15"


def test_resuming_a_job_that_never_started_starts_it(box):
    job_id = box.launch("steps=3", place={"hold": True})
    edits.stop(box.data, job_id)
    box.wait_ended(job_id)
    assert box.resume(job_id).step == 0
    assert box.messages(job_id, "resuming") == ["starts from step 0, because it has not saved a checkpoint"]
    job = box.wait_ended(job_id)
    assert (job.state, job.attempt, job.held) == (JobState.FINISHED, 1, False)


CUT_OFF = """
import os, signal, sys
from pathlib import Path
from jobs.conftest import Box
from sae_tui.jobs.launch import launching
setattr(launching, sys.argv[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
Box(Path(sys.argv[1])).launch("steps=3")
"""


def cut_off(box, function: str) -> None:
    """Launch a job in a process that is killed when it calls the named function."""
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", CUT_OFF, box.data.root.parent, function]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": f"{tests}:{tests.parent}"})
    assert done.returncode == -signal.SIGKILL


def test_a_launch_killed_before_it_writes_its_files_leaves_no_job(box):
    cut_off(box, "_write_files")
    assert box.control.jobs() == []
    assert box.wait_ended(box.launch("steps=3")).state == JobState.FINISHED


def test_a_job_without_files_or_supervisor_can_be_cloned_and_resumed(box):
    cut_off(box, "start_or_fail")
    (job,) = box.control.jobs()
    shutil.rmtree(box.data.run(job.id).root)  # an earlier version could leave a job in this state
    box.control.update(job.id, queued=time.time() - 3600)
    reconcile(box.data)
    assert (box.job(job.id).state, box.job(job.id).error) == (JobState.LOST, "its supervisor never started")
    assert clone_settings(box.data, job.id, ["train.lr=0.5"]) == box.config("steps=3").replace("train", lr=0.5)
    box.resume(job.id)
    assert box.wait_ended(job.id).state == JobState.FINISHED


def test_a_resumed_job_keeps_its_current_priority_unless_another_is_given(box):
    job_id = box.launch("steps=10 crash=0@3#1 crash=0@3#2")
    box.wait_ended(job_id)
    edit(box, edits.prioritise, job_id, 7)
    box.resume(job_id)
    assert box.wait_ended(job_id).priority == 7
    box.resume(job_id, "launch.priority=3")
    assert box.wait_ended(job_id).priority == 3


def test_a_job_from_another_host_is_resumed_on_this_host(box):
    job_id = box.launch("steps=10 crash=0@3#1")
    box.wait_ended(job_id)
    box.control.update(job_id, host="elsewhere")
    box.resume(job_id)
    job = box.wait_ended(job_id)
    assert (job.state, job.host) == (JobState.FINISHED, socket.gethostname())


@pytest.mark.parametrize("override", ["launch.gpus=cpu:2", 'launch.backend="slurm"', "launch.nodes=2"])
def test_a_setting_that_affects_placement_triggers_a_new_placement(box, override):
    job_id = box.launch("steps=10 crash=0@3#1", gpus=(0,))
    job = box.wait_ended(job_id)
    elsewhere = box.placement(world_size=2)
    assert prepare(box.data, job, lambda _: elsewhere, [override]).placement == elsewhere
    again = prepare(box.data, job, lambda _: elsewhere, ["launch.max_restarts=1"]).placement
    assert (again.gpus, again.world_size, again.device) == (((0, "GPU-0"),), 1, "cuda")
    # The current state of these GPUs is unknown, so the job reserves the same amount of memory as before.
    assert again.had_bytes == job.card_memory_bytes


def test_a_refusal_to_resume_a_job_states_the_reason(box):
    waiting = box.launch("steps=3", place={"hold": True})
    with pytest.raises(UserError, match=rf"job {waiting} is held; to change its settings, stop it, then resume it"):
        box.resume(waiting)
    running = box.launch(ENDLESS)
    box.wait_steps(running)
    with pytest.raises(
        UserError, match=rf"job {running} is running; only a job that has ended or is paused can be resumed"
    ):
        box.resume(running)
    edits.stop(box.data, running)
    box.wait_ended(running)
    with pytest.raises(JobFileError, match=r"--set sae\.k: the config of a run is frozen"):
        box.resume(running, "sae.k=8")
    for checkpoint in box.data.run(running).checkpoints.iterdir():
        (checkpoint / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"nothing to resume: every checkpoint in .* is damaged"):
        box.resume(running)
    shutil.rmtree(box.data.run(running).root)
    with pytest.raises(UserError, match=f"job {running} cannot be resumed: its run folder was deleted"):
        box.resume(running)
    assert box.job(running).state == JobState.STOPPED


def test_a_resumed_job_is_not_lost_while_its_supervisor_starts(box):
    job_id = box.record(created=time.time() - 3600)
    box.control.transition(job_id, JobState.STOPPED)
    box.control.transition(job_id, JobState.QUEUED)
    assert reconcile(box.data) == []
    assert box.job(job_id).state == JobState.QUEUED


def test_a_request_to_finish_does_not_stop_a_job_which_can_still_be_paused(box):
    job_id = box.launch(ENDLESS)
    box.control.request(job_id, "finish")
    box.wait_steps(job_id)
    assert box.job(job_id).state == JobState.RUNNING
    edits.pause(box.data, job_id)
    wait_paused(box, job_id)
    edits.stop(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED
