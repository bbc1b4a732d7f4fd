"""Checks the comparison of SAEs trained with different seeds against brute force in NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from trainer.evaluation import stability
from trainer.evaluation.stability import matched_cosine, nearest

SIZES = st.tuples(st.integers(1, 6), st.integers(2, 5), st.integers(0, 2**31))


def directions(n: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def cosines(own: torch.Tensor, other: torch.Tensor) -> np.ndarray:
    a, b = own.double().numpy(), other.double().numpy()
    return (a / np.linalg.norm(a, axis=1, keepdims=True)) @ (b / np.linalg.norm(b, axis=1, keepdims=True)).T


@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(1, 7))
def test_the_largest_cosines_of_both_saes_are_found_in_one_pass(size, n_others) -> None:
    n, d, seed = size
    own, other = directions(n, d, seed), directions(n_others, d, seed + 1)
    table = cosines(own, other)
    of_own, of_other = nearest(own, other)
    assert of_own.cosine.numpy() == pytest.approx(table.max(axis=1), abs=1e-5)
    assert of_other.cosine.numpy() == pytest.approx(table.max(axis=0), abs=1e-5)
    assert table[np.arange(n), of_own.latent] == pytest.approx(table.max(axis=1), abs=1e-5)
    assert table[of_other.latent, np.arange(n_others)] == pytest.approx(table.max(axis=0), abs=1e-5)


def test_comparing_latents_in_parts_gives_the_same_result(monkeypatch) -> None:
    own, other = directions(50, 8, 0), directions(60, 8, 1)
    whole = nearest(own, other)
    monkeypatch.setattr(stability, "_AT_ONCE", 7)
    for found, expected in zip(nearest(own, other), whole, strict=True):
        assert torch.allclose(found.cosine, expected.cosine)
        assert torch.equal(found.latent, expected.latent)


@settings(max_examples=30, deadline=None)
@given(SIZES)
def test_pw_mcc_is_the_mean_cosine_of_the_best_one_to_one_matching(size) -> None:
    n, d, seed = size
    own, other = directions(n, d, seed), directions(n, d, seed + 1)
    table = cosines(own, other)
    best = max(np.mean([table[i, j] for i, j in enumerate(order)]) for order in itertools.permutations(range(n)))
    assert matched_cosine(own, other) == pytest.approx(best, abs=1e-5)


def test_latents_that_differ_only_in_order_and_scale_are_completely_stable() -> None:
    own = directions(40, 16, 0)
    other = own[torch.randperm(40, generator=torch.Generator().manual_seed(1))] * torch.rand(40, 1).add(0.1)
    assert nearest(own, other)[0].cosine.tolist() == pytest.approx([1.0] * 40, abs=1e-5)
    assert matched_cosine(own, other) == pytest.approx(1.0, abs=1e-5)


def test_a_duplicated_latent_counts_twice_for_stability_but_once_for_matching() -> None:
    other = normalize(directions(2, 16, 0), dim=1)
    own = other[[0, 0]]
    assert nearest(own, other)[0].cosine.tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    assert matched_cosine(own, other) < 0.9


def test_all_zero_directions_have_a_cosine_of_zero() -> None:
    assert nearest(torch.zeros(3, 4), directions(3, 4, 0))[0].cosine.tolist() == [0.0] * 3


def test_too_many_latents_are_not_matched(monkeypatch) -> None:
    monkeypatch.setattr(stability, "MOST_MATCHED", 3)
    assert matched_cosine(directions(4, 2, 0), directions(4, 2, 1)) is None
