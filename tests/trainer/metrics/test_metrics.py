from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import trainer.metrics.pace
from trainer.contract.settings import catalog
from trainer.contract.settings.catalog import MetricEntry, Series
from trainer.metrics.base import Metric, Observation
from trainer.metrics.dead import DeadFraction
from trainer.metrics.interval import Interval
from trainer.metrics.pace import LEAST_BUSY, DataWait, Pace, Rate
from trainer.metrics.reconstruction import ExplainedVariance, Fvu
from trainer.metrics.sparsity import L0, L1, DenseLatents
from trainer.parallel.base import Parallel
from trainer.parallel.latents import Latents
from trainer.parallel.waiting import HostWaits
from trainer.saes.losses import Moments, Sums
from trainer.saes.sparse_acts import Acts, DenseActs, SparseActs, SparseIndices

D_SAE = 10


def as_sparse(dense: Tensor) -> SparseActs:
    """Return sparse activations with an entry for every value, including inactive ones."""
    n_tokens, d_sae = dense.shape
    tokens = torch.arange(n_tokens).repeat_interleave(d_sae)
    indices = SparseIndices(torch.arange(d_sae).repeat(n_tokens), tokens, torch.arange(n_tokens) * d_sae)
    return SparseActs(dense.flatten(), indices, d_sae)


def three_active(n_tokens: int) -> Acts:
    dense = torch.zeros(n_tokens, D_SAE)
    dense[:, 2:5] = torch.tensor([1.0, 2.0, 0.5])
    return as_sparse(dense)


def observation(
    y: Tensor, x_hat: Tensor | None = None, *, acts: Acts | None = None, y_mean: float = 0.0, dead: int = 1
) -> Observation:
    x_hat = y if x_hat is None else x_hat
    acts = three_active(len(y)) if acts is None else acts
    dead_latents, mean = torch.arange(D_SAE) < dead, torch.full(y.shape[1:], y_mean)
    return Observation(y, x_hat, acts, dead_latents, mean, (y - x_hat).square().sum())


def interval_with(metric: type[Metric], *seen: Observation) -> Interval:
    """Return an interval that has observed the given batches with a single metric, named "it"."""
    entry = MetricEntry(f"{metric.__module__}:{metric.__name__}", "", Series("it"))
    interval = Interval(entries={"it": entry})
    for one in seen:
        interval.observe(one)
    return interval


def sums_of(metric: type[Metric], *seen: Observation) -> Tensor:
    """Return a metric's sums on one rank after the given batches."""
    return interval_with(metric, *seen).sums(Latents(D_SAE))["it"]


def measured(metric: type[Metric], *seen: Observation) -> float:
    return metric().value(sums_of(metric, *seen))


def random_batch(n: int = 100, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return targets with very different norms, and reconstructions with both a constant and a random error."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(n, 5, generator=generator) * torch.linspace(1, 9, n)[:, None] + 3
    return y, y + torch.randn(n, 5, generator=generator) + torch.arange(5)


def fvu_of(y: Tensor, x_hat: Tensor) -> float:
    y, x_hat = y.double(), x_hat.double()
    return float((y - x_hat).square().sum() / (y - y.mean(dim=0)).square().sum())


def explained_variance_of(y: Tensor, x_hat: Tensor) -> float:
    """Compute the same value as scikit-learn's explained_variance_score with multioutput="variance_weighted"."""
    y, x_hat = y.double(), x_hat.double()
    scores = 1 - (y - x_hat).var(dim=0, correction=0) / y.var(dim=0, correction=0)
    weights = y.var(dim=0, correction=0)
    return float((scores * weights).sum() / weights.sum())


# Tests for individual metrics.


@pytest.mark.parametrize(("metric", "reference"), [(Fvu, fvu_of), (ExplainedVariance, explained_variance_of)])
def test_reconstruction_over_uneven_ranks_is_a_ratio_of_sums_not_a_mean_of_ratios(metric, reference) -> None:
    y, x_hat = random_batch()
    first = sums_of(metric, observation(y[:10], x_hat[:10]))
    second = sums_of(metric, observation(y[10:40], x_hat[10:40]), observation(y[40:], x_hat[40:]))
    assert metric().value(first + second) == pytest.approx(reference(y, x_hat), rel=1e-5)


@pytest.mark.parametrize(("metric", "reference"), [(Fvu, fvu_of), (ExplainedVariance, explained_variance_of)])
def test_reconstruction_stays_precise_if_the_mean_is_far_larger_than_the_spread(metric, reference) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(5000, 5, generator=generator) + 30_000
    x_hat = y + 0.3 * torch.randn(5000, 5, generator=generator)
    observed = observation(y, x_hat, y_mean=30_000)
    assert measured(metric, observed) == pytest.approx(reference(y, x_hat), rel=1e-4)


def test_a_constant_error_counts_in_fvu_but_not_in_explained_variance() -> None:
    y, _ = random_batch()
    observed = observation(y, y + 7)
    assert measured(Fvu, observed) > 0.5
    assert measured(ExplainedVariance, observed) == pytest.approx(1, abs=1e-5)


def test_constant_data_yields_finite_metrics() -> None:
    observed = observation(torch.full((20, 5), 2.0))
    assert measured(Fvu, observed) == 0
    assert measured(ExplainedVariance, observed) == 1


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_l0_l1_and_dense_latents_match_a_loop(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(200, D_SAE, generator=generator)
    frequency = torch.linspace(0, 0.4, D_SAE)
    dense = values * (torch.rand(200, D_SAE, generator=generator) < frequency)
    batches = [
        observation(torch.zeros(len(part), 2), acts=as_sparse(part) if kind == "sparse" else DenseActs(part))
        for part in dense.split([150, 50])
    ]
    assert measured(L0, *batches) == pytest.approx(float((dense > 0).sum()) / 200)
    assert measured(L1, *batches) == pytest.approx(float(dense.sum()) / 200)
    often = [latent for latent in range(D_SAE) if int((dense[:, latent] > 0).sum()) > 20]
    assert 0 < len(often) < D_SAE
    assert measured(DenseLatents, *batches) == pytest.approx(len(often) / D_SAE)


def test_whether_a_latent_is_dense_depends_on_the_tokens_on_all_ranks() -> None:
    # The latent is dense over the first rank's tokens, but not over the tokens from both ranks.
    ranks = []
    for n_tokens, n_active in ((100, 30), (900, 30)):
        dense = torch.zeros(n_tokens, D_SAE)
        dense[:n_active, 4] = 1
        ranks.append(sums_of(DenseLatents, observation(torch.zeros(n_tokens, 2), acts=as_sparse(dense))))
    assert DenseLatents().value(ranks[0]) == pytest.approx(0.1)
    assert DenseLatents().value(ranks[0] + ranks[1]) == 0


def test_the_dead_fraction_is_measured_at_the_end_of_the_interval() -> None:
    y = torch.zeros(8, 2)
    assert measured(DeadFraction, observation(y, dead=7), observation(y, dead=3)) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [(L0, 3.0), (L1, 3.5), (DeadFraction, 0.1), (DenseLatents, 0.3), (Fvu, 0.0), (ExplainedVariance, 1.0)],
)
def test_a_ratio_is_the_same_on_one_rank_and_on_three_ranks(metric: type[Metric], expected: float) -> None:
    y, _ = random_batch(8)
    for ranks in (1, 3):
        assert metric().value(sums_of(metric, observation(y)) * ranks) == pytest.approx(expected)


# Tests for log intervals.


def terms_of(seen: Observation) -> dict[str, Tensor]:
    error = (seen.y - seen.x_hat).square().sum()
    return {"loss": error / 2, "mse": error, "unused": torch.tensor(0.0)}


def interval_of(*batches: Observation) -> dict[str, float]:
    interval = Interval(("loss", "mse"))
    for observed in batches:
        interval.observe(observed, terms_of(observed))
    return interval.values(interval.sums(Latents(batches[0].dead.numel())))


def test_an_interval_yields_every_registered_metric_and_the_mean_of_every_loss_term() -> None:
    y, x_hat = random_batch()
    values = interval_of(observation(y[:30], x_hat[:30]), observation(y[30:], x_hat[30:]))
    assert set(values) == {*catalog.METRICS, "loss", "mse"}
    mse = float((y.double() - x_hat.double()).square().sum()) / 100
    assert (values["mse"], values["loss"]) == pytest.approx((mse, mse / 2))
    assert values["fvu"] == pytest.approx(fvu_of(y, x_hat), rel=1e-5)


def test_sums_restart_after_every_log_and_are_exact_over_a_long_interval() -> None:
    y, x_hat = random_batch(8)
    interval = Interval(("loss", "mse"))
    observed = observation(y, x_hat)
    sums = []
    for n_batches in (1, 1000):
        for _ in range(n_batches):
            interval.observe(observed, terms_of(observed))
        sums.append(interval.sums(Latents(D_SAE)))
    for name, once in sums[0].items():
        # The dead fraction is not a sum, but the value at the end of the interval.
        assert torch.equal(sums[1][name], once if name == "dead_fraction" else 1000 * once), name


def test_counts_and_sums_already_computed_by_the_training_pass_are_reused() -> None:
    y, x_hat = random_batch(8)
    sums = Sums(Moments(torch.tensor(17.0), torch.full((5,), 2.0)), Moments(torch.tensor(34.0), torch.zeros(5)))
    seen = replace(observation(y, x_hat), mse=torch.tensor(17.0), counts=torch.arange(D_SAE).float(), sums=sums)
    assert sums_of(Fvu, seen)[0] == 17
    assert measured(Fvu, seen) == 0.5
    assert measured(ExplainedVariance, seen) == pytest.approx(1 - (17 - 5 * 2**2 / 8) / 34)
    assert measured(L0, seen) == sum(range(D_SAE)) / 8


def with_a_nan(n: int = 50) -> Observation:
    """Return a batch with much larger values, and a NaN in one row of both its targets and its activations."""
    y, x_hat = random_batch(n, seed=1)
    y[7, 2] = torch.nan
    acts = three_active(n)
    values = acts.values * 100
    values[7 * D_SAE + 3] = torch.nan
    return observation(100 * y, 90 * x_hat, acts=acts.with_values(values))


def test_a_batch_with_a_nan_is_excluded_as_in_training() -> None:
    y, x_hat = random_batch()
    good = observation(y, x_hat)
    assert interval_of(good, with_a_nan()) == pytest.approx(interval_of(good))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_batch_is_excluded_even_if_only_its_loss_is_non_finite(value: float) -> None:
    y, x_hat = random_batch()
    good = observation(y, x_hat)
    interval = Interval(("loss", "mse"))
    interval.observe(good, terms_of(good))
    interval.observe(good, terms_of(good) | {"loss": torch.tensor(value)})
    assert interval.values(interval.sums(Latents(D_SAE))) == interval_of(good)


def test_an_interval_with_only_nan_batches_has_nan_values() -> None:
    values = interval_of(with_a_nan())
    for name in ("fvu", "explained_variance", "l0", "l1", "loss", "mse"):
        assert math.isnan(values[name]), name


# Tests for a run's speed.


class Waiting(Parallel):
    """A single rank that claims to have spent `waited` seconds waiting for other ranks."""

    waited = 0.0

    def take_waits(self) -> HostWaits:
        waited, self.waited = self.waited, 0.0
        return HostWaits(waited)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock with a list whose only element is the time in seconds."""
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


@pytest.fixture
def parallel() -> Waiting:
    return Waiting(torch.device("cpu"))


def after(pace: Pace, clock: list[float], seconds: float, *, n_tokens: int = 4000, data_s: float = 0.0) -> dict:
    """Return the sums for an interval of 4 steps that took `seconds` seconds."""
    pace.begin(10.0)
    clock[0] += seconds
    return pace.sums(pace.end(n_tokens, 4, 10.0 + data_s))


def test_the_total_speed_is_the_tokens_on_all_ranks_divided_by_their_mean_seconds(parallel, clock) -> None:
    pace = Pace(parallel)
    sums = after(pace, clock, 2.0, data_s=0.5)
    assert pace.values(sums)["tokens_per_s"] == pytest.approx(2000)
    pace = Pace(parallel)
    sums = after(pace, clock, 2.0, data_s=0.5)
    values = pace.values(sums | {"pace": sums["pace"] * 3})
    assert values["tokens_per_s"] == pytest.approx(6000)
    assert values["data_wait"] == pytest.approx(0.25)
    assert values["memory_bytes"] > 2**20


def test_a_ranks_speed_excludes_waits_for_other_ranks(parallel, clock) -> None:
    pace = Pace(parallel)
    pace.begin(0.0)
    clock[0] += 2.0
    parallel.waited = 1.5
    sums = pace.sums(pace.end(4000, 4, 0.0))
    assert sums["rank_tokens_per_s"].tolist() == pytest.approx([8000])
    assert sums["step_ms"].tolist() == pytest.approx([500])
    assert sums["busy_ms"].tolist() == pytest.approx([125])


def test_a_rank_waiting_for_data_is_not_busy(parallel, clock) -> None:
    sums = after(Pace(parallel), clock, 2.0, data_s=0.5)
    assert sums["busy_ms"].tolist() == pytest.approx([375])
    assert sums["data_ms"].tolist() == pytest.approx([125])


def test_waits_before_an_interval_do_not_count(parallel, clock) -> None:
    pace = Pace(parallel)
    parallel.waited = 99.0
    assert after(pace, clock, 2.0)["rank_tokens_per_s"].tolist() == pytest.approx([2000])


def test_a_ranks_busy_share_has_a_minimum(parallel, clock) -> None:
    pace = Pace(parallel)
    pace.begin(0.0)
    clock[0] += 2.0
    parallel.waited = 99.0
    assert pace.sums(pace.end(4000, 4, 0.0))["rank_tokens_per_s"].tolist() == pytest.approx([2000 / LEAST_BUSY])


def test_memory_already_in_use_at_the_start_does_not_count_as_foreign(parallel, clock, monkeypatch) -> None:
    gb, pace = 10**9, Pace(parallel)
    held = iter([4 * gb, 4 * gb, 7 * gb, 3 * gb])
    monkeypatch.setattr(trainer.metrics.pace, "foreign_bytes", lambda device: next(held))
    found = [after(pace, clock, 1.0)["foreign_bytes"].item() for _ in range(4)]
    assert found == [0, 0, 3 * gb, 0]


def test_a_short_interval_barely_moves_the_rate_but_a_lasting_change_does() -> None:
    rate = Rate()
    assert rate.add(50_000, 10) == 5000
    assert rate.add(2500, 0.01) == pytest.approx(5000, rel=0.5)
    for _ in range(4):
        last = rate.add(1000 * 10, 10)
    assert last == pytest.approx(1000, rel=0.05)


def test_a_lasting_wait_for_data_and_its_end_are_each_reported_once() -> None:
    wait = DataWait()
    # Each value is the share of a 4-second interval spent waiting for data.
    # A wait is reported once the share exceeds 10 % for 10 s, and its end once the share is below 5 %.
    shares = [0.5, 0.3, 0.02, 0.5, 0.5, 0.5, 0.5, 0.08, 0.5, 0.04, 0.04, 0.11, 0.11, 0.11]
    found = [wait.look(share, 4.0) for share in shares]
    assert {i: one for i, one in enumerate(found) if one is not None} == {5: True, 9: False, 13: True}
