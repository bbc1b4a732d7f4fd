"""The life of jobs with real training processes; few tests, since each process imports torch."""

from __future__ import annotations

import os
import signal
import time

import pytest

from sae_tui.jobs import edits
from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.view.reader import JobReader
from trainer.contract.store.states import JobState

TWO_CARDS = Placement("cpu", ((0, "GPU-51a0-sim-0"), (1, "GPU-51a0-sim-1")), 2)
START_S = 90.0


def launch(box, n_steps: int = 1_000_000) -> int:
    job = box.config().replace("train", n_steps=n_steps, log_every=1)
    return launching.launch(box.data, job, TWO_CARDS, gpu_source="simulated")


@pytest.mark.timeout(200)
def test_ranks_stop_on_request_and_have_saved(box, wait_for):
    job_id = launch(box)
    box.wait(job_id, JobState.RUNNING, timeout_s=START_S)
    reader = JobReader(box.data, job_id)
    wait_for(lambda: reader.poll() and {("loss", 0), ("tokens_per_s", 0)} <= reader.series.keys(), "curves")
    edits.stop(box.data, job_id)
    job = box.wait_ended(job_id, timeout_s=START_S)
    assert (job.state, job.error) == (JobState.STOPPED, None)
    assert [rank.exit_code for rank in box.control.ranks(job_id)] == [3, 3]
    assert any(box.data.run(job_id).checkpoints.iterdir())
    reader.close()


@pytest.mark.timeout(200)
def test_a_killed_rank_is_the_cause_although_its_peer_reports_a_lost_connection(box):
    job_id = launch(box)
    box.wait(job_id, JobState.RUNNING, timeout_s=START_S)
    killed = box.control.ranks(job_id)[1]
    killed.process.send(signal.SIGKILL)
    begun = time.monotonic()
    job = box.wait_ended(job_id)
    assert time.monotonic() - begun < 12
    assert job.state == JobState.FAILED
    assert job.error.startswith("rank 1 was killed (SIGKILL)")
    assert box.living(job_id) == []


@pytest.mark.timeout(200)
def test_ranks_do_not_outlive_a_killed_supervisor(box):
    job_id = launch(box)
    box.wait(job_id, JobState.RUNNING, timeout_s=START_S)
    os.kill(box.job(job_id).supervisor_pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not reconcile(box.data):
        assert time.monotonic() < deadline, box.living(job_id)
        time.sleep(0.1)
    assert box.job(job_id).state == JobState.LOST
    assert box.living(job_id) == []
    assert any(box.data.run(job_id).checkpoints.iterdir())


@pytest.mark.timeout(200)
def test_a_stop_before_the_first_step_ends_the_job_and_two_jobs_of_one_second_do_not_meet(box):
    first = launch(box)
    job = box.config().replace("train", n_steps=3)
    second = launching.launch(box.data, job, Placement("cpu", (), 2), gpu_source="none")
    edits.stop(box.data, first)
    assert box.wait_ended(second, timeout_s=START_S).state == JobState.FINISHED
    assert box.wait_ended(first, timeout_s=START_S).state == JobState.STOPPED
