"""Tests for jobs whose ranks crash or hang: whether and how often the jobs are restarted, and what is reported."""

from __future__ import annotations

import functools
import signal
import sys
from pathlib import Path

import pytest
from support.workloads import stream_of_model

from sae_tui.jobs import detach, edits
from sae_tui.jobs.launch import launching
from trainer.contract.errors import JobFileError
from trainer.contract.runs.rank_spec import read_spec
from trainer.contract.settings.job_file import parse_job
from trainer.contract.store.states import JobState

ENDLESS = "steps=100000"
FAKE_SUPERVISOR = [sys.executable, str(Path(__file__).with_name("fake_supervisor.py"))]


def ranks_by_attempt(box, job_id: int) -> list[tuple[int, int | None, int | None]]:
    return [(rank.attempt, rank.exit_code, rank.exit_signal) for rank in box.control.ranks(job_id)]


def test_a_crashed_job_continues_from_its_checkpoint_as_a_new_attempt(box):
    job_id = box.launch("steps=20 save=4 crash=0@10#1", gpus=(0,), max_restarts=3)
    job = box.wait_ended(job_id)
    assert (job.state, job.error, job.attempt, job.restarts, job.step) == (JobState.FINISHED, None, 2, 1, 20)
    assert ranks_by_attempt(box, job_id) == [(1, None, signal.SIGKILL), (2, 0, None)]
    assert "made the steps 9 to 20" in box.data.run(job_id).log(0).read_text()
    crashed = "rank 0 was killed (SIGKILL); its last log line: step 10 will be the last"
    assert box.messages(job_id, "restarting") == [f"crashed: {crashed}; restart 1 of 3"]
    assert crashed in (box.data.run(job_id).attempt(1) / "exit.json").read_text()
    assert box.control.leases() == []


def test_a_job_that_keeps_crashing_is_restarted_at_most_max_restarts_times(box):
    job_id = box.launch("crash=0@2", max_restarts=2)
    job = box.wait_ended(job_id)
    assert (job.state, job.attempt, job.restarts) == (JobState.FAILED, 3, 2)
    assert job.error.startswith("rank 0 was killed (SIGKILL)")
    assert [attempt for attempt, *_ in ranks_by_attempt(box, job_id)] == [1, 2, 3]
    assert len(box.messages(job_id, "restarting")) == 2


def test_a_job_keeps_its_gpus_from_one_attempt_to_the_next(box):
    first = box.launch("steps=40 crash=0@10#1 crash=0@10#2", gpus=(0,), max_restarts=2)
    box.wait(first, JobState.STARTING, JobState.RUNNING)
    second = box.launch("steps=1", gpus=(0,))
    assert box.wait_ended(first).attempt == 3
    assert box.wait_ended(second).started >= box.job(first).ended
    assert not (box.data.root / "runs" / "double-booking").exists()


@pytest.mark.parametrize(("model_gpus", "n_ranks"), [(2, 2), (3, 1), ("auto", 4)])
def test_in_every_attempt_the_language_models_gpus_are_leased_and_pinned_but_get_no_ranks(
    box, tmp_path, model_gpus, n_ranks
):
    data = stream_of_model(tmp_path)
    table = {"name": "steps=20 save=4 crash=0@10#1", "data": data | {"model_gpus": model_gpus}}
    table |= {"train": {"n_steps": 20}, "launch": {"gpus": [0, 1, 2, 3], "max_restarts": 1}}
    config, problems = parse_job(table)
    assert config, problems
    start = functools.partial(detach.start, command=FAKE_SUPERVISOR)
    job_id = launching.launch(box.data, config, box.placement((0, 1, 2, 3)), gpu_source="none", start=start)
    job = box.wait_ended(job_id)
    assert (job.state, job.error, job.attempt, job.world_size) == (JobState.FINISHED, None, 2, 4)
    assert sorted({(rank.attempt, rank.rank) for rank in box.control.ranks(job_id)}) == [
        (attempt, rank) for attempt in (1, 2) for rank in range(n_ranks)
    ]
    for attempt in (1, 2):
        spec = read_spec(box.data.run(job_id).rank_spec(attempt))
        assert (spec.world_size, spec.model_gpus) == (n_ranks, 4 - n_ranks)
        assert spec.gpu_uuids == ("GPU-0", "GPU-1", "GPU-2", "GPU-3")
    assert f"of {n_ranks} begins" in box.data.run(job_id).log(0).read_text()
    with pytest.raises(JobFileError, match=r"^data.model_gpus: with 4 GPUs, only 2 and 3 work"):
        box.resume(job_id, "train.n_steps=40", "data.model_gpus=1", gpus=(0, 1, 2, 3))
    box.resume(job_id, "train.n_steps=40", "data.model_gpus=3", gpus=(0, 1, 2, 3))
    assert (box.wait_ended(job_id).step, read_spec(box.data.run(job_id).rank_spec(3)).model_gpus) == (40, 3)


@pytest.mark.parametrize(
    ("word", "error", "cause"),
    [
        ("fail=0@2", "RuntimeError: the loss is not finite", "lower train.lr"),
        ("oom=0@2", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "half the train.batch_"),
    ],
)
def test_a_job_whose_failure_would_recur_is_not_restarted(box, word, error, cause):
    job_id = box.launch(word, max_restarts=3)
    job = box.wait_ended(job_id)
    assert (job.state, job.attempt, job.error) == (JobState.FAILED, 1, error)
    (message,) = box.messages(job_id, "not-restarted")
    assert error not in message, "the error is shown elsewhere and must not be repeated"
    assert cause in message


@pytest.mark.parametrize("ended", [edits.stop, edits.kill])
def test_a_job_ended_by_its_user_is_not_restarted(box, ended):
    job_id = box.launch(ENDLESS, gpus=(0,), max_restarts=3)
    box.wait_steps(job_id)
    ended(box.data, job_id)
    job = box.wait_ended(job_id)
    assert (job.state, job.attempt, job.restarts) == (JobState.STOPPED, 1, 0)


@pytest.mark.parametrize(("ask", "state"), [(edits.stop, JobState.STOPPED), (edits.pause, JobState.QUEUED)])
def test_a_job_waiting_for_its_restart_can_be_stopped_or_paused(box, ask, state):
    job_id = box.launch("crash=0@2", gpus=(0,), max_restarts=9)
    box.wait_for(lambda: len(box.messages(job_id, "restarting")) == 2, "the second restart, 5 s away")
    ask(box.data, job_id)
    job = box.wait(job_id, state, timeout_s=4)
    assert (job.attempt, box.control.leases()) == (2, [])
    if state == JobState.STOPPED:
        assert job.error.startswith("was asked to end after a crash: rank 0 was killed")
    else:
        assert job.held


def test_a_job_that_crashes_while_it_is_being_stopped_is_not_restarted(box):
    job_id = box.launch("deaf crash=0@80", max_restarts=3)
    box.wait_steps(job_id)
    edits.stop(box.data, job_id)
    assert (box.wait_ended(job_id).attempt, box.job(job_id).state) == (1, JobState.FAILED)


def test_a_run_whose_checkpoints_are_all_damaged_fails_with_that_reason(box):
    job_id = box.launch("steps=30 save=5 crash=0@12#1", max_restarts=1, place={"hold": True})
    damaged = box.data.run(job_id).checkpoints / "step-00000005"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{}")
    box.control.update(job_id, held=False)
    job = box.wait_ended(job_id)
    assert job.state == JobState.FAILED
    assert f"the checkpoint {damaged} cannot be used" in job.error


# Ranks that hang.


@pytest.fixture
def impatient(monkeypatch) -> dict[str, float]:
    """Return settings for ending a stalled job after a few seconds."""
    monkeypatch.setenv("FAKE_KILL_AFTER_S", "0.5")
    return {"stalled_after_s": 0.5, "end_stalled_after_s": 5.0}


def test_a_halted_rank_is_named_and_its_job_is_restarted(box, impatient):
    job_id = box.launch("steps=12 hang=1@6#1", gpus=(0, 1), max_restarts=1, **impatient)
    job = box.wait_ended(job_id, timeout_s=60)
    assert (job.state, job.attempt, job.error) == (JobState.FINISHED, 2, None)
    (stalled,), (given_up,) = box.messages(job_id, "stalled"), box.messages(job_id, "given-up")
    assert stalled.startswith("has taken no step for")
    assert given_up.startswith("took no step for")
    assert given_up.endswith("s and was ended: rank 1 is halted (SIGSTOP)")
    stacks = box.data.run(job_id).attempt(1) / "stacks.txt"
    assert box.messages(job_id, "stacks") == [f"rank 1 is halted (SIGSTOP); {stacks} contains the stacks of its ranks"]
    assert "== rank 1 (pid" in stacks.read_text()
    assert [signalled for attempt, _, signalled in ranks_by_attempt(box, job_id) if attempt == 1] == [None, 9]


def test_a_rank_that_never_continues_fails_the_job_and_is_named_in_the_error(box, impatient):
    job_id = box.launch("steps=12 hang=0@6", **impatient)
    job = box.wait_ended(job_id, timeout_s=60)
    assert job.state == JobState.FAILED
    assert job.error.endswith("s and was ended: rank 0 is halted (SIGSTOP)")
    assert box.living(job_id) == []


def test_a_hanging_attempt_fails_even_if_its_ranks_save_when_they_are_ended(box, impatient):
    job_id = box.launch("steps=12 idle=0@6#1", world_size=2, max_restarts=1, **impatient)
    job = box.wait_ended(job_id, timeout_s=60)
    assert (job.state, job.attempt) == (JobState.FINISHED, 2)
    assert {code for attempt, code, _ in ranks_by_attempt(box, job_id) if attempt == 1} == {3}


def test_a_stalled_job_that_continues_is_not_ended(box):
    job_id = box.launch("steps=40 hang=0@6", stalled_after_s=0.5, end_stalled_after_s=0)
    box.wait(job_id, JobState.STALLED)
    (rank,) = box.control.ranks(job_id)
    rank.process.send(signal.SIGTERM)
    rank.process.send(signal.SIGCONT)
    assert box.wait_ended(job_id).state == JobState.STOPPED
    assert box.messages(job_id, "given-up") == []


def test_a_stalled_job_can_be_stopped(box, impatient):
    job_id = box.launch("steps=12 idle=0@6", stalled_after_s=0.5, end_stalled_after_s=0)
    box.wait(job_id, JobState.STALLED)
    edits.kill(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED
