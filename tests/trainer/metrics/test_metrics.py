from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from trainer.contract import catalog
from trainer.metrics.base import Metric, Observation
from trainer.metrics.dead import DeadFraction
from trainer.metrics.interval import Interval
from trainer.metrics.rate import Rate
from trainer.metrics.reconstruction import Fvu
from trainer.metrics.sparsity import L0
from trainer.metrics.throughput import TokensPerSecond


def observation(x: Tensor, x_hat: Tensor | None = None, *, x_mean: float = 0.0, dead: int = 1) -> Observation:
    acts = torch.zeros(len(x), 4)
    acts[:, :3] = 1.0
    dead_latents = torch.arange(10) < dead
    return Observation(x, x if x_hat is None else x_hat, acts, dead_latents, torch.full(x.shape[1:], x_mean))


def naive_fvu(x: Tensor, x_hat: Tensor) -> float:
    x, x_hat = x.double(), x_hat.double()
    return float((x - x_hat).square().sum() / (x - x.mean(dim=0)).square().sum())


def test_fvu_over_uneven_ranks_is_that_of_all_tokens_and_not_the_mean_of_ratios() -> None:
    x = torch.randn(100, 5) * torch.linspace(1, 9, 100)[:, None]
    x_hat = x + torch.randn(100, 5)
    first, second = Fvu(), Fvu()
    first.update(observation(x[:10], x_hat[:10]))
    second.update(observation(x[10:40], x_hat[10:40]))
    second.update(observation(x[40:], x_hat[40:]))
    assert first.value(first.sums() + second.sums()) == pytest.approx(naive_fvu(x, x_hat), rel=1e-5)


def test_fvu_keeps_its_digits_when_the_mean_is_far_larger_than_the_spread() -> None:
    x = torch.randn(5000, 5) + 30_000
    x_hat = x + 0.1 * torch.randn(5000, 5)
    metric = Fvu()
    metric.update(observation(x, x_hat, x_mean=30_000))
    assert metric.value(metric.sums()) == pytest.approx(naive_fvu(x, x_hat), rel=1e-4)


@pytest.mark.parametrize(("metric", "expected"), [(L0(), 3.0), (DeadFraction(), 0.1)])
def test_a_ratio_is_the_same_from_one_rank_or_three(metric: Metric, expected: float) -> None:
    for ranks in (1, 3):
        metric.update(observation(torch.ones(8, 2)))
        assert metric.value(metric.sums() * ranks) == pytest.approx(expected)


def test_sums_start_anew_after_every_log() -> None:
    metric = L0()
    metric.update(observation(torch.ones(8, 2)))
    first = metric.sums()
    metric.update(observation(torch.ones(8, 2)))
    assert torch.equal(metric.sums(), first)


def test_tokens_per_second_of_two_ranks_is_twice_that_of_one() -> None:
    assert TokensPerSecond().value(torch.tensor([1000.0, 2.0, 1.0])) == 500
    assert TokensPerSecond().value(torch.tensor([2000.0, 4.0, 2.0])) == 1000
    metric = TokensPerSecond()
    metric.update(observation(torch.ones(8, 2)))
    n_tokens, seconds, ranks = metric.sums().tolist()
    assert (n_tokens, ranks) == (8, 1)
    assert seconds > 0


def test_an_interval_gives_every_registered_metric_and_the_mean_of_every_term() -> None:
    interval = Interval(("loss", "mse"))
    for value in (1.0, 3.0):
        terms = {"mse": torch.tensor(8 * value), "loss": torch.tensor(16 * value), "unused": torch.tensor(0.0)}
        interval.observe(observation(torch.randn(8, 2)), terms)
    rate, step_ms = interval.pace(2, waited_s=0.0)
    values = interval.values(interval.sums())
    assert set(values) == {*catalog.METRICS, "loss", "mse"}
    assert (values["mse"], values["loss"]) == (2.0, 4.0)
    assert rate > 0
    assert step_ms > 0


def test_the_pace_of_a_rank_leaves_out_what_it_waited_for_others() -> None:
    interval = Interval(("loss",))
    interval.observe(observation(torch.ones(1000, 2)), {"loss": torch.tensor(1.0)})
    rate, _ = interval.pace(1, waited_s=-99.0)  # as if 99 s more had been spent working
    assert 9 < rate < 11


def test_a_rank_is_never_faster_than_a_hundredth_of_the_interval_allows() -> None:
    interval = Interval(("loss",))
    began = time.perf_counter()
    interval.observe(observation(torch.ones(1000, 2)), {"loss": torch.tensor(1.0)})
    rate, _ = interval.pace(1, waited_s=99.0)
    assert 1000 / (time.perf_counter() - began) < rate
    assert rate < 1e9


def test_a_short_interval_hardly_moves_the_rate_and_a_lasting_change_does() -> None:
    rate = Rate()
    assert rate.add(50_000, 10) == 5000
    assert rate.add(2500, 0.01) == pytest.approx(5000, rel=0.5)
    for _ in range(4):
        last = rate.add(1000 * 10, 10)
    assert last == pytest.approx(1000, rel=0.05)
