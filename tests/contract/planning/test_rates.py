from __future__ import annotations

from collections.abc import Callable

import pytest

from trainer.contract.planning.rates import full_rate, rate_problems
from trainer.contract.planning.workload import Layout
from trainer.contract.settings.job import JobConfig

MakeJob = Callable[..., JobConfig]


def test_auto_is_the_optimizers_learning_rate_and_twice_that_with_tied_updates(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 3072}, train={"batch_size": 4096})
    assert full_rate(Layout(job, 1), 3072, is_transcoder=False) == pytest.approx(12e-3)
    assert full_rate(Layout(job, 1), 3072, is_transcoder=True) == pytest.approx(6e-3)


def test_auto_is_lower_in_long_runs_with_tied_updates(make_job: MakeJob) -> None:
    def rate(n_steps: int, *, is_transcoder: bool = False, lr_length: str = "auto") -> float:
        layout = Layout(make_job(train={"n_steps": n_steps, "lr_length": lr_length}), 1)
        return full_rate(layout, 3072, is_transcoder=is_transcoder)

    assert rate(1) == rate(1000) == pytest.approx(12e-3)
    assert rate(32_000) == pytest.approx(6e-3)
    rates = [rate(n_steps) for n_steps in range(1000, 100_000, 500)]
    assert rates == sorted(rates, reverse=True)
    assert rate(32_000, lr_length="off") == rate(1000)
    assert rate(32_000, is_transcoder=True) == rate(100, is_transcoder=True)


@pytest.mark.parametrize(("lr", "warned"), [(0.3, False), (0.5, True), (200_000.0, True)])
def test_a_learning_rate_far_above_auto_triggers_a_warning(make_job: MakeJob, lr: float, warned: bool) -> None:
    layout = Layout(make_job(sae={"d_sae": 3072}, train={"lr": lr}), 1)
    problems = rate_problems(layout, 3072, is_transcoder=False)
    assert [(one.path, one.severity) for one in problems] == [("train.lr", "warning")] * warned
    if lr == 200_000:
        sentence = "200000 is 16,666,667 times the value of auto here, 0.012; training may diverge"
        assert problems[0].message == sentence
