from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from support.steps import ALONE, take_alone

from trainer.contract.settings.job import JobConfig
from trainer.runtime.phases import BACKWARD, ENCODER, EXCHANGE, FORWARD, METRICS, UPDATE, phase
from trainer.training.learner import Learner


def test_phase_marks_do_nothing_without_a_profiler() -> None:
    assert phase(FORWARD) is phase(UPDATE)
    with phase(FORWARD), phase(ENCODER):
        pass


def test_a_step_profile_shows_each_phase_once_and_in_order(make_job: Callable[..., JobConfig]) -> None:
    learner, x = Learner(make_job(), 16, None, ALONE), torch.randn(128, 16)
    learner.initialise(x, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take_alone(learner, 0, x)
    marks = sorted(
        (event for event in profile.events() if event.name.startswith("sae:")), key=lambda e: e.time_range.start
    )
    assert [mark.name for mark in marks] == [FORWARD, ENCODER, BACKWARD, METRICS, EXCHANGE, UPDATE]
    forward, encoder, *rest = [mark.time_range for mark in marks]
    assert forward.start <= encoder.start < encoder.end <= forward.end
    assert all(one.end <= following.start for one, following in itertools.pairwise([forward, *rest]))
