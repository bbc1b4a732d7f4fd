"""Checks the correlation of latents' activations between SAEs with different seeds against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.activations.base import Pair
from trainer.activations.training_data import HALVES
from trainer.evaluation import firing_correlation
from trainer.evaluation.exported import ExportedSae
from trainer.evaluation.firing_correlation import firing_correlations
from trainer.evaluation.rows import EvaluationRows
from trainer.evaluation.stability import nearest
from trainer.sharing.base import SharedSae
from trainer.training.thresholds import OF_HALVES

D_IN, D_SAE, N_ROWS = 6, 10, 200
CPU = torch.device("cpu")


class Rows:
    """Yields two halves of the given rows, in batches; each half is measured with its own thresholds."""

    digest = "0123456789abcdef"

    def __init__(self, x: Tensor) -> None:
        self.halves = x.chunk(len(HALVES))

    def batches(self, measuring_half: Callable[[int], AbstractContextManager[None]], stage: str) -> Iterator[Pair]:
        for half, rows in enumerate(self.halves):
            with measuring_half(half):
                yield from ((some, some) for some in rows.split(64))


def rows_of(x: Tensor) -> EvaluationRows:
    return cast(EvaluationRows, Rows(x))


def random_rows(seed: int = 0) -> Tensor:
    return torch.randn(N_ROWS, D_IN, generator=torch.Generator().manual_seed(seed))


def random_sae(seed: int, thresholds: list[float]) -> ExportedSae:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"W_enc": (D_IN, D_SAE), "W_dec": (D_SAE, D_IN), "b_enc": (D_SAE,), "b_dec": (D_IN,)}
    weights = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    # A latent that never fires.
    weights["b_enc"][3] = -100.0
    weights["threshold"] = torch.full((D_SAE,), 0.5)
    metadata = {OF_HALVES: thresholds}
    return ExportedSae(SharedSae({"architecture": "jumprelu"}, weights, metadata), CPU)


def activations(sae: ExportedSae, rows: Tensor) -> np.ndarray:
    parts = []
    for half, some in enumerate(rows.chunk(len(HALVES))):
        with sae.measuring_half(half):
            parts.append(sae.encode(some).values)
    return torch.cat(parts).double().numpy()


@pytest.mark.parametrize("at_once", [1, 2**24])
def test_each_latent_is_correlated_with_its_partner_over_all_rows(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing_correlation, "_AT_ONCE", at_once)
    x, saes = random_rows(), {"seed=0": random_sae(0, [0.2, 0.9]), "seed=1": random_sae(1, [0.4, 0.1])}
    acts = {label: activations(sae, x) for label, sae in saes.items()}
    partners = dict(
        zip(
            (("seed=0", "seed=1"), ("seed=1", "seed=0")),
            (one.latent for one in nearest(saes["seed=0"].W_dec, saes["seed=1"].W_dec)),
            strict=True,
        )
    )
    found = firing_correlations(saes, partners, rows_of(x))
    assert (found.n_rows, found.rows) == (N_ROWS, Rows.digest)
    for (one, other), correlation in found.of_pairs.items():
        assert torch.equal(correlation.isnan(), torch.arange(D_SAE) == 3)
        for latent in range(D_SAE):
            partner = int(partners[one, other][latent])
            if latent != 3:
                pair = acts[one][:, latent], acts[other][:, partner]
                expected = 0.0 if partner == 3 else np.corrcoef(*pair)[0, 1]
                assert float(correlation[latent]) == pytest.approx(expected, abs=1e-5)


def test_the_correlation_with_a_partner_that_never_fires_is_zero() -> None:
    saes = {"seed=0": random_sae(0, [0.2, 0.2]), "seed=1": random_sae(1, [0.2, 0.2])}
    found = firing_correlations(saes, {("seed=0", "seed=1"): torch.full((D_SAE,), 3)}, rows_of(random_rows()))
    correlation = found.of_pairs["seed=0", "seed=1"]
    assert correlation[torch.arange(D_SAE) != 3].tolist() == [0.0] * (D_SAE - 1)


def test_latents_that_differ_only_in_order_and_scale_have_a_correlation_of_one() -> None:
    own, order = random_sae(0, [0.0, 0.0]), torch.randperm(D_SAE, generator=torch.Generator().manual_seed(1))
    scale = torch.linspace(0.5, 3.0, D_SAE)
    weights = {
        "W_enc": (own._weights["W_enc"] * scale)[:, order],
        "W_dec": own.W_dec[order],
        "b_enc": (own._weights["b_enc"] * scale)[order],
        "b_dec": own.b_dec,
    }
    other = ExportedSae(SharedSae({"architecture": "standard"}, weights, {}), CPU)
    partner = nearest(own.W_dec, other.W_dec)[0].latent
    found = firing_correlations({"a": own, "b": other}, {("a", "b"): partner}, rows_of(random_rows()))
    correlation = found.of_pairs["a", "b"]
    assert correlation[correlation.isfinite()].tolist() == pytest.approx([1.0] * (D_SAE - 1), abs=1e-5)
