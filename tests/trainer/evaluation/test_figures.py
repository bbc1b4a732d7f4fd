"""The figures of an SAE against naive loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.contract.runs.report_card import BINS_PER_DECADE, LEAST_ROWS_FOR_RARE, LOWEST_DECADE
from trainer.evaluation.figures import (
    QUANTILES,
    histogram,
    largest_cosines,
    measure,
    ratio_error,
    recovered,
)
from trainer.saes.sparse_acts import DenseActs

N, D, F = 700, 12, 40


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(1)) * torch.arange(1, D + 1) + 3


@pytest.fixture(scope="module")
def w_dec() -> Tensor:
    return torch.randn(F, D, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def acts(rows: Tensor) -> Tensor:
    wanted = torch.rand(N, F, generator=torch.Generator().manual_seed(3))
    # Latent 0 never fires, latent 1 always, latent 2 on a fifteenth of the rows, latent 3 once.
    share = torch.full((F,), 0.3)
    share[:3] = torch.tensor([0.0, 1.1, 1 / 15])
    fires = wanted < share
    fires[:, 3] = torch.arange(N) == 5
    return fires * (wanted + 0.1)


def test_every_figure_is_that_of_a_naive_loop(rows: Tensor, w_dec: Tensor, acts: Tensor) -> None:
    x_hat = 0.8 * rows + 0.1 * acts @ w_dec
    where = {tuple(row.tolist()): index for index, row in enumerate(rows)}

    def reconstruct(x: Tensor, _y: Tensor) -> tuple[DenseActs, Tensor]:
        first = where[tuple(x[0].tolist())]
        return DenseActs(acts[first : first + len(x)]), x_hat[first : first + len(x)]

    told = measure(reconstruct, lambda: [(part, part) for part in rows.split(128)], w_dec)
    x, y, z = rows.double().numpy(), x_hat.double().numpy(), acts.numpy()
    mean = sum(x) / N
    error = np.array([sum((a - b) ** 2) for a, b in zip(x, y, strict=True)])
    spread = np.array([sum((a - mean) ** 2) for a in x])
    cosines = [a @ b / math.sqrt((a @ a) * (b @ b)) for a, b in zip(x, y, strict=True)]
    l0 = np.array([sum(row > 0) for row in z])
    density = (z > 0).mean(axis=0)
    assert told.fvu == pytest.approx(sum(error) / sum(spread), rel=1e-6)
    assert told.median_row_fvu == pytest.approx(np.sort(error / spread)[(N - 1) // 2], rel=1e-6)
    assert told.explained_variance == pytest.approx(1 - told.fvu)
    assert told.mse == pytest.approx(sum(error) / N, rel=1e-6)
    assert told.cosine == pytest.approx(sum(cosines) / N, rel=1e-6)
    assert told.l0 == pytest.approx(l0.mean())
    assert told.l0_quantiles == pytest.approx(list(np.quantile(l0, QUANTILES)))
    ratios = np.linalg.norm(y, axis=1) / np.linalg.norm(x, axis=1)
    assert told.l2_ratio == pytest.approx(ratios.mean(), rel=1e-6)
    assert told.relative_reconstruction_bias == pytest.approx((y**2).sum() / (x * y).sum(), rel=1e-6)
    assert told.dead == (density == 0).mean() > 0
    assert told.dead_error == pytest.approx(math.sqrt(told.dead * (1 - told.dead) / F))
    assert told.dense_1 == (density > 0.01).mean()
    assert told.dense_10 == (density > 0.1).mean()
    assert sum(told.density_histogram) == (density > 0).sum()
    assert (told.n_tokens, told.d_in, told.d_sae) == (N, D, F)


def test_the_error_of_the_fvu_is_what_resampling_the_rows_gives() -> None:
    generator = np.random.default_rng(0)
    spread = generator.gamma(2.0, size=4000)
    error = 0.3 * spread * generator.uniform(0.2, 1.8, size=4000)
    resampled = []
    for _ in range(600):
        drawn = generator.integers(0, 4000, 4000)
        resampled.append(error[drawn].sum() / spread[drawn].sum())
    assert ratio_error(torch.tensor(error), torch.tensor(spread)) == pytest.approx(np.std(resampled), rel=0.15)
    assert math.isnan(ratio_error(torch.ones(1), torch.ones(1)))


def test_the_share_of_rare_latents_is_not_told_where_too_few_rows_could_show_one() -> None:
    """On so few rows a latent that fires at all is above that share."""
    fires = torch.zeros(LEAST_ROWS_FOR_RARE, 4)
    fires[:9, 0] = 1
    fires[:, 1] = 1
    fires[:11, 2] = 1

    def rare(n: int) -> float | None:
        parts = list(fires[:n].split(1000))
        starts = iter(parts)
        return measure(
            lambda x, _: (DenseActs(next(starts)), x), lambda: [(one, one) for one in parts], torch.eye(4)
        ).rare

    assert rare(len(fires)) == 0.25
    assert rare(len(fires) - 1000) is None


def test_densities_are_counted_by_half_decades_and_never_firing_not_at_all() -> None:
    n_bins = -LOWEST_DECADE * BINS_PER_DECADE
    counts = histogram(torch.tensor([0.0, 1.0, 0.5, 0.2, 0.011, 1e-9]))
    assert len(counts) == n_bins
    assert counts[-1] == 2
    assert counts[-2] == 1
    assert counts[-4] == 1
    assert counts[0] == 1


def test_the_nearest_directions_are_found_by_comparing_each_pair(w_dec: Tensor) -> None:
    unit = (w_dec / w_dec.norm(dim=1, keepdim=True)).double().numpy()
    nearest = [max(float(a @ b) for j, b in enumerate(unit) if j != i) for i, a in enumerate(unit)]
    assert largest_cosines(w_dec) == pytest.approx(sum(nearest) / F, rel=1e-5)
    assert math.isnan(largest_cosines(w_dec[:1]))
    known = 7 * w_dec[[4, 9, 30]]
    assert recovered(known, w_dec) == pytest.approx(1.0, abs=1e-6)


def test_nothing_to_measure_on_is_said(w_dec: Tensor) -> None:
    with pytest.raises(ValueError, match="no row"):
        measure(lambda x, _: (DenseActs(x), x), list, w_dec)
