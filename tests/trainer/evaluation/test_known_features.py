"""Checks the detection of known features against SAELens."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.activations.synthetic import Synthetic
from trainer.evaluation import known_features as module
from trainer.evaluation.known_features import N_ROWS, known_features
from trainer.saes.sparse_acts import DenseActs

DATA: dict[str, Any] = {"d_in": 32, "n_features": 80, "active": 4.0, "skew": 0.6, "n_rows": 5000}


def source(**settings: Any) -> Synthetic:
    return Synthetic(**DATA | settings)


def encoder(w_dec: Tensor, threshold: float = 0.6):
    return lambda x: DenseActs((x @ w_dec.T - threshold).relu())


def directions(of: Synthetic, n: int = 60) -> Tensor:
    """Return noisy copies of the features, some of them duplicated, and one all-zero latent."""
    noise = torch.randn(n, of.d_in, generator=torch.Generator().manual_seed(1))
    near = of.features[torch.arange(n) % 50] + 0.1 * noise
    near[-1] = 0
    return near


@pytest.mark.parametrize("settings", [{}, {"children": 3, "active": 8.0}, {"topics": 4}, {"noise": 0.1}])
def test_the_figures_match_those_of_saelens(settings: dict[str, Any]) -> None:
    evals = pytest.importorskip("sae_lens.synthetic.evals")
    of = source(**settings)
    w_dec = directions(of)
    found = known_features(of, w_dec, encoder(w_dec))
    assert found is not None
    numbers = of.n_tokens + np.arange(N_ROWS)
    acts, known = encoder(w_dec)(of.rows(numbers)).values, of.firings(numbers)
    oracle = evals.compute_classification_metrics(acts, known, w_dec, of.features)
    assert found.f1 == pytest.approx(oracle.f1_score, abs=1e-5)
    assert found.precision == pytest.approx(oracle.precision, abs=1e-5)
    assert found.recall == pytest.approx(oracle.recall, abs=1e-5)
    assert found.mcc == pytest.approx(evals.mean_correlation_coefficient(w_dec, of.features), abs=1e-5)
    assert found.uniqueness == pytest.approx(evals.feature_uniqueness(w_dec, of.features))
    assert found.true_l0 == pytest.approx(float((known > 0).float().sum(1).mean()))
    assert (found.n_features, found.n_rows) == (80, N_ROWS)


def test_an_sae_made_of_the_true_features_is_nearly_perfect_and_a_random_one_is_not() -> None:
    of = source(d_in=256, n_features=64, active=3.0)
    best = known_features(of, of.features, encoder(of.features, 0.4))
    random = torch.nn.functional.normalize(torch.randn(64, 256, generator=torch.Generator().manual_seed(2)), dim=1)
    worst = known_features(of, random, encoder(random, 0.4))
    assert best is not None
    assert worst is not None
    assert best.f1 > 0.95
    assert (best.mcc, best.uniqueness) == (pytest.approx(1), 1)
    assert worst.f1 < 0.2
    assert best.f1_error < worst.f1 + 0.05


@pytest.mark.parametrize("n_latents", [50, 64, 90])
def test_if_all_best_partners_differ_the_mcc_needs_no_scipy(n_latents: int, monkeypatch) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    cosines = torch.rand(n_latents, 64, generator=torch.Generator().manual_seed(0))
    cosines += torch.eye(n_latents, 64)
    best = cosines.numpy()[optimize.linear_sum_assignment(cosines.numpy(), maximize=True)].mean()
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert module._matched(cosines) == pytest.approx(best)


def test_wide_saes_get_no_mcc_but_the_same_other_figures(monkeypatch) -> None:
    of = source()
    w_dec = directions(of)
    whole = known_features(of, w_dec, encoder(w_dec))
    monkeypatch.setattr(module, "MOST_MATCHED", 10)
    monkeypatch.setattr(module, "_AT_ONCE", 7)
    parts = known_features(of, w_dec, encoder(w_dec))
    assert whole is not None
    assert parts is not None
    assert parts.mcc is None
    assert (parts.f1, parts.uniqueness) == (pytest.approx(whole.f1), whole.uniqueness)


def test_a_diverged_sae_gets_no_mcc_but_still_gets_its_other_figures(monkeypatch) -> None:
    of = source()
    w_dec = directions(of)
    w_dec[3] = torch.nan
    found = known_features(of, w_dec, lambda x: DenseActs((x @ w_dec.T - 0.6).relu().nan_to_num()))
    assert found is not None
    assert found.mcc is None
    assert found.f1 > 0.3


def test_different_data_settings_have_different_digests() -> None:
    w_dec = directions(source())
    found = [known_features(source(**one), w_dec, encoder(w_dec)) for one in ({}, {}, {"topics": 2}, {"data_seed": 1})]
    digests = [one.data for one in found if one]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
