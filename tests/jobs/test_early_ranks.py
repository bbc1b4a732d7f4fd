"""Tests for ranks that are started before their job's turn, and whose processes may die at any time."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.box import processes_of

from sae_tui.jobs import detach, edits
from sae_tui.jobs.launch import launching
from sae_tui.jobs.queue_process import EARLY_S, QueueProcess
from sae_tui.jobs.reconcile import reconcile
from trainer.contract.process import ProcessRef, state_of
from trainer.contract.store.states import JobState

FAKE_SUPERVISOR = [sys.executable, str(Path(__file__).with_name("fake_supervisor.py"))]
ENDLESS = "steps=100000"


@pytest.fixture(autouse=True)
def _early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the supervisors of fake ranks start them early."""
    monkeypatch.setenv("FAKE_EARLY", "1")


def array(box, *names: str) -> list[int]:
    """Launch jobs of which only one may run at a time, each with its own supervisor; the first one runs."""
    box.make_store()
    jobs = [(box.config(name), box.placement()) for name in names]
    start = functools.partial(detach.start, command=FAKE_SUPERVISOR)
    ids = launching.launch_all(box.data, jobs, gpu_source="none", as_array=True, at_once=1, start=start)
    box.wait_steps(ids[0])
    return ids


def early_rank(box, job_id: int) -> ProcessRef:
    """Wait for the rank that a queued job's supervisor starts early."""
    spec = box.data.run(job_id).rank_spec(1)
    box.wait_for(lambda: processes_of(spec), "a rank started early")
    assert not spec.exists()
    (pid,) = processes_of(spec)
    return ProcessRef.of(pid)


def test_a_rank_started_early_runs_the_job_when_its_turn_comes(box):
    first, second = array(box, ENDLESS, "steps=2")
    early = early_rank(box, second)
    assert not box.data.run(second).log(0).exists()
    edits.stop(box.data, first)
    assert box.wait_ended(second).state == JobState.FINISHED
    (rank,) = box.control.ranks(second)
    assert (rank.process, rank.exit_code) == (early, 0)
    assert box.data.run(second).log(0).read_text().splitlines() == ["rank 0 of 1 begins", "made the steps 1 to 2"]


def test_a_job_whose_early_rank_was_killed_starts_with_another_rank(box):
    first, second = array(box, ENDLESS, "steps=2")
    early = early_rank(box, second)
    early.send(signal.SIGKILL)
    box.wait_for(lambda: not early.is_alive(), "the rank to be gone")
    edits.stop(box.data, first)
    job = box.wait_ended(second)
    assert (job.state, job.attempt, job.restarts) == (JobState.FINISHED, 1, 0)
    assert [rank.process == early for rank in box.control.ranks(second)] == [False]


def test_an_early_rank_ends_with_its_supervisor_and_the_job_stays_queued(box):
    first, second = array(box, ENDLESS, "steps=2")
    early = early_rank(box, second)
    box.job(second).supervisor.send(signal.SIGKILL)
    box.wait_for(lambda: not early.is_alive(), "the rank to be gone")
    reconcile(box.data)
    assert box.job(second).state == JobState.QUEUED
    box.start_queue()
    edits.stop(box.data, first)
    assert box.wait_ended(second).state == JobState.FINISHED


def test_an_early_rank_ends_when_its_job_is_stopped(box):
    _, second = array(box, ENDLESS, "steps=2")
    early = early_rank(box, second)
    edits.stop(box.data, second)
    assert box.wait_ended(second).state == JobState.STOPPED
    box.wait_for(lambda: not early.is_alive(), "the rank to be gone")


def test_the_next_job_prepares_while_another_ends_unless_it_is_held(box):
    box.start_queue()
    first, second = box.enqueue("steps=450", gpus=(0,)), box.enqueue("steps=2", gpus=(0,))
    early = early_rank(box, second)
    supervisor = box.job(second).supervisor
    assert box.job(first).state in (JobState.STARTING, JobState.RUNNING)
    edits.hold(box.data, box.control, second)
    box.wait_for(lambda: not (early.is_alive() or supervisor.is_alive()), "the supervisor and its rank to exit")
    edits.release(box.data, box.control, second)
    assert box.wait_ended(second).started >= box.job(first).ended
    assert [box.job(job_id).state for job_id in (first, second)] == [JobState.FINISHED] * 2


# Starts a rank early that only waits for its turn, then replaces this program, as after an upgrade.
UPGRADED = """
import os, sys
from pathlib import Path
from sae_tui.jobs.launchers.early_ranks import EarlyRanks
from trainer.contract.runs.rank_spec import RankSpec
waits = "import os; from trainer.contract.runs.grant import *; receive_grant(int(os.environ[CHANNEL]))"
early = EarlyRanks()
early.start(RankSpec(Path("run"), Path("out"), 1, 1, "cpu"), lambda spec: [sys.executable, "-c", waits])
print("started", flush=True)
os.execv("/bin/sleep", ["sleep", "60"])
"""


def test_an_early_rank_ends_if_its_supervisor_restarts_after_an_upgrade(wait_for):
    with subprocess.Popen([sys.executable, "-c", UPGRADED], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout.readline() == "started\n"
        (child,) = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
        wait_for(lambda: state_of(int(child)) == "Z", "the rank to exit")
        supervisor.kill()


def queue_of(box, left_s: float) -> tuple[list[int], QueueProcess]:
    """Return a queue process that records the jobs it starts, and starts none, while job 1 runs for `left_s` more."""
    me = ProcessRef.current()
    at = {"step": 10, "total_steps": 20, "tokens": 1000, "tokens_per_s": 1000 / left_s}
    fields = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}
    first, *_ = [box.enqueue("steps=1", gpus=(0,)) for _ in range(3)]
    control, job = box.control, box.job(first)
    assert control.lease(job, [(0, "GPU-0")], {}, None, attempt=1, gpu_ids=(0,), gpu_uuids=("GPU-0",))
    control.transition(first, JobState.RUNNING)
    control.update(first, **at, **fields)
    started: list[int] = []
    return started, QueueProcess(box.data, lambda _, job_id: started.append(job_id))


def test_only_the_next_jobs_supervisor_starts_early_and_only_once(box):
    started, queue = queue_of(box, left_s=20.0)
    queue._plan()
    queue._plan()
    assert started == [2]


def test_while_no_job_ends_soon_the_queue_is_planned_again_in_time(box):
    started, queue = queue_of(box, left_s=50.0)
    queue._plan()
    assert started == []
    assert queue._plan_at - time.monotonic() <= 50.0 - EARLY_S
