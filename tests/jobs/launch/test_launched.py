"""Tests for the messages shown after a launch."""

from __future__ import annotations

import time

import pytest

from sae_tui.actions import describe_launch
from trainer.contract.store.states import JobState

KEEPS = "It keeps running if you quit."


@pytest.mark.parametrize(
    ("state", "fields", "said"),
    [
        (JobState.STARTING, {"gpu_ids": (0, 1)}, f'Job 1 "quick" started on GPU 0,1. {KEEPS}'),
        (JobState.RUNNING, {}, f'Job 1 "quick" started on the CPU. {KEEPS}'),
        (JobState.RUNNING, {"world_size": 2}, f'Job 1 "quick" started on 2 CPU processes. {KEEPS}'),
        (JobState.STARTING, {"backend": "slurm"}, f'Job 1 "quick" started through SLURM. {KEEPS}'),
        (JobState.QUEUED, {"waits_for": "GPU 2 is lost"}, f"Job 1 is waiting: GPU 2 is lost. {KEEPS}"),
        (JobState.FAILED, {"error": "no data"}, 'Job 1 "quick" failed: no data.'),
    ],
)
def test_the_message_about_a_launched_job_matches_its_state(box, state, fields, said):
    box.record("quick", state=state, **fields)
    expected = said.removesuffix(f" {KEEPS}") if state == JobState.QUEUED else said
    assert describe_launch(box.data, [1]) == expected


def test_a_warning_replaces_the_promise_to_continue_if_jobs_end_at_logout(box):
    box.record("quick", state=JobState.RUNNING)
    message = describe_launch(box.data, [1], but="jobs end when you log out")
    assert message == 'Job 1 "quick" started on the CPU. But jobs end when you log out.'


def test_the_message_about_several_jobs_counts_them(box):
    ids = [box.record(state=state, waits_for="GPU 0") for state in (JobState.RUNNING, JobState.QUEUED, JobState.QUEUED)]
    assert describe_launch(box.data, ids) == "3 jobs launched: 1 started, 2 are waiting. They keep running if you quit."


def test_the_message_is_delayed_briefly_until_the_jobs_state_is_known(box, monkeypatch):
    job_id = box.record("quick")
    assert describe_launch(box.data, [job_id], is_over=lambda: True) == "Job 1 is queued."
    monkeypatch.setattr(time, "sleep", lambda _: box.control.update(job_id, waits_for="GPU 0 is lost"))
    assert describe_launch(box.data, [job_id]) == "Job 1 is waiting: GPU 0 is lost."
