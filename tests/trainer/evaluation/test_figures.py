"""Checks an SAE's metrics against naive float64 loops and against SAELens's evaluation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.extractions import CPU
from support.saes import made
from support.tiny_models import make_model
from torch import Tensor

from trainer.contract.runs.report_card import BINS_PER_DECADE, LEAST_ROWS_FOR_RARE, LOWEST_DECADE
from trainer.evaluation.exported import read_exported
from trainer.evaluation.figures import (
    QUANTILES,
    by_label,
    histogram,
    largest_cosines,
    measure,
    ratio_error,
    recovered,
)
from trainer.extraction.model_stream import ModelStream
from trainer.extraction.packing import ContextBatch
from trainer.saes.sparse_acts import DenseActs
from trainer.sharing.saelens import export_sae, origin

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
    # Latent 0 never fires, latent 1 always fires, latent 2 fires on every 15th row on average, and latent 3 fires once.
    share = torch.full((F,), 0.3)
    share[:3] = torch.tensor([0.0, 1.1, 1 / 15])
    fires = wanted < share
    fires[:, 3] = torch.arange(N) == 5
    return fires * (wanted + 0.1)


def test_every_figure_matches_a_naive_loop(rows: Tensor, w_dec: Tensor, acts: Tensor) -> None:
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
    assert told.l0_below_most == pytest.approx(np.mean(np.asarray(l0) < np.max(l0)))
    ratios = np.linalg.norm(y, axis=1) / np.linalg.norm(x, axis=1)
    assert told.l2_ratio == pytest.approx(ratios.mean(), rel=1e-6)
    assert told.relative_reconstruction_bias == pytest.approx((y**2).sum() / (x * y).sum(), rel=1e-6)
    assert told.dead == (density == 0).mean() > 0
    assert told.dead_error == pytest.approx(math.sqrt(told.dead * (1 - told.dead) / F))
    assert told.dense_1 == (density > 0.01).mean()
    assert told.dense_10 == (density > 0.1).mean()
    assert sum(told.density_histogram) == (density > 0).sum()
    assert (told.n_tokens, told.d_in, told.d_sae) == (N, D, F)


@torch.no_grad()
def test_figures_that_saelens_also_computes_match_its_values(tmp_path: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    from sae_lens.evals import get_sparsity_and_variance_metrics
    from sae_lens.load_model import load_model
    from sae_lens.training.activation_scaler import ActivationScaler

    model = make_model(tmp_path / "model", "llama")
    (tmp_path / "text.txt").write_text("a cat sat")
    stream = ModelStream(model=str(model), hook="resid_post.1", text=str(tmp_path / "text.txt"), context=16)
    stream.begin(0, 1, CPU)
    # The SAE has 128 latents, some of which never fire, and the rows are far from the origin.
    sae = made("standard", x_scale=0.1, y_scale=0.1)
    sae.b_enc.copy_(torch.linspace(-8, 1, 128))
    export_sae(sae, tmp_path / "sae", origin(stream.meta))
    theirs = sae_lens.SAE.load_from_disk(tmp_path / "sae")
    tokens = torch.randint(3, 290, (50, 16), generator=torch.Generator().manual_seed(0))

    class Store:
        def get_batch_tokens(self, _: int) -> Tensor:
            return tokens

    expected, by_latent = get_sparsity_and_variance_metrics(
        sae=theirs, model=load_model("AutoModelForCausalLM", str(model), "cpu"), activation_store=Store(),
        activation_scaler=ActivationScaler(), n_batches=1, compute_l2_norms=True, compute_sparsity_metrics=True,
        compute_variance_metrics=True, compute_featurewise_density_statistics=True, eval_batch_size_prompts=50,
        model_kwargs={},
    )  # fmt: skip
    batch = ContextBatch(tokens.numpy(), np.tile(np.arange(16), (50, 1)), np.repeat(np.arange(50)[:, None], 16, axis=1))
    (rows,) = stream._model.rows(batch, torch.arange(tokens.numel()))
    exported = read_exported(tmp_path / "sae", CPU)
    told = measure(exported.reconstruct, lambda: [(part, part) for part in rows.split(128)], exported.W_dec)
    for ours, name in {
        "explained_variance": "explained_variance", "mse": "mse", "cosine": "cossim", "l0": "l0",
        "l2_ratio": "l2_ratio", "relative_reconstruction_bias": "relative_reconstruction_bias",
    }.items():  # fmt: skip
        assert getattr(told, ours) == pytest.approx(expected[name], rel=1e-4), name
    density = torch.tensor(by_latent["feature_density"])
    assert told.dead == (density == 0).double().mean().item() > 0
    assert told.dense_1 == (density > 0.01).double().mean().item()
    assert told.dense_10 == (density > 0.1).double().mean().item() < told.dense_1
    assert told.density_histogram == histogram(density)


def test_the_fvus_clustered_standard_error_matches_a_jackknife_over_texts() -> None:
    generator = np.random.default_rng(5)
    text = generator.integers(0, 60, 3000)
    hardness = generator.uniform(0.5, 2, 60)[text]
    spread = generator.gamma(2.0, size=3000)
    error = 0.3 * spread * hardness * generator.uniform(0.5, 1.5, 3000)
    left_out = np.array([error[text != one].sum() / spread[text != one].sum() for one in range(60)])
    jackknife = math.sqrt(59 / 60 * ((left_out - left_out.mean()) ** 2).sum())
    by_text = [by_label(text, torch.from_numpy(one)) for one in (error, spread)]
    assert ratio_error(*by_text) == pytest.approx(jackknife, rel=0.02)
    # If rows were treated as independent, this standard error would be less than half as large.
    assert ratio_error(torch.from_numpy(error), torch.from_numpy(spread)) < 0.5 * jackknife


def test_the_fvus_standard_error_matches_a_bootstrap_over_rows() -> None:
    generator = np.random.default_rng(0)
    spread = generator.gamma(2.0, size=4000)
    error = 0.3 * spread * generator.uniform(0.2, 1.8, size=4000)
    resampled = []
    for _ in range(600):
        drawn = generator.integers(0, 4000, 4000)
        resampled.append(error[drawn].sum() / spread[drawn].sum())
    assert ratio_error(torch.tensor(error), torch.tensor(spread)) == pytest.approx(np.std(resampled), rel=0.15)
    assert math.isnan(ratio_error(torch.ones(1), torch.ones(1)))


def test_the_share_of_rare_latents_is_measured_only_if_there_are_enough_rows() -> None:
    """Check that the share is None if there are too few rows to estimate such low densities."""
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


def test_densities_of_firing_latents_are_binned_by_half_decade() -> None:
    n_bins = -LOWEST_DECADE * BINS_PER_DECADE
    counts = histogram(torch.tensor([0.0, 1.0, 0.5, 0.2, 0.011, 1e-9]))
    assert len(counts) == n_bins
    assert counts[-1] == 2
    assert counts[-2] == 1
    assert counts[-4] == 1
    assert counts[0] == 1


def test_nearest_directions_match_a_comparison_of_all_pairs(w_dec: Tensor) -> None:
    unit = (w_dec / w_dec.norm(dim=1, keepdim=True)).double().numpy()
    nearest = [max(float(a @ b) for j, b in enumerate(unit) if j != i) for i, a in enumerate(unit)]
    assert largest_cosines(w_dec) == pytest.approx(sum(nearest) / F, rel=1e-5)
    assert math.isnan(largest_cosines(w_dec[:1]))
    known = 7 * w_dec[[4, 9, 30]]
    assert recovered(known, w_dec) == pytest.approx(1.0, abs=1e-6)


def test_evaluating_without_rows_is_refused(w_dec: Tensor) -> None:
    with pytest.raises(ValueError, match="no row"):
        measure(lambda x, _: (DenseActs(x), x), list, w_dec)
