from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.activations.permutation import Permutation, RunPermutation, permutation


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**40))
@settings(max_examples=200)
def test_each_position_has_a_different_row(n: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(n, seed, epoch)(np.arange(n)).tolist()) == list(range(n))


@given(n=st.integers(1, 2**62), start=st.integers(0, 2**62), seed=st.integers(0, 99))
def test_any_range_of_positions_can_be_computed_separately(n: int, start: int, seed: int) -> None:
    start %= n
    positions = np.arange(start, min(n, start + 100))
    permuted = Permutation(n, seed)(positions)
    assert permuted.dtype == np.int64
    assert permuted.min() >= 0
    assert permuted.max() < n
    assert len(set(permuted.tolist())) == len(positions)
    assert np.array_equal(permuted[50:], Permutation(n, seed)(positions[50:]))


def test_the_given_positions_are_not_modified() -> None:
    positions = np.arange(100)
    Permutation(100, 0)(positions)
    assert np.array_equal(positions, np.arange(100))


def test_each_seed_and_each_epoch_has_a_different_order() -> None:
    orders = {tuple(Permutation(50, seed, epoch)(np.arange(50)).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize("n", [16, 1000, 16_384])
def test_every_row_is_equally_likely_at_every_position(n: int) -> None:
    # For 2,000 seeds, bin the rows found at 16 positions into 16 bins, and run a chi-squared test on the counts.
    places = np.linspace(0, n - 1, 16).astype(np.int64)
    counts = np.zeros((16, 16))
    for seed in range(2000):
        np.add.at(counts, (np.arange(16), Permutation(n, seed)(places) * 16 // n), 1)
    assert ((counts - 125) ** 2 / 125).sum() / (16 * 15) == pytest.approx(1, abs=0.35)


def test_adjacent_rows_are_separated() -> None:
    n = 100_000
    permuted = Permutation(n, 0)(np.arange(n)).astype(float)
    assert abs(np.corrcoef(permuted[:-1], permuted[1:])[0, 1]) < 4 / n**0.5
    # In a random order, two thirds of the elements are local extrema.
    turns = np.diff(np.sign(np.diff(permuted))) != 0
    assert turns.mean() == pytest.approx(2 / 3, abs=0.01)


@given(n=st.integers(1, 3000), run=st.integers(1, 70), seed=st.integers(0, 2**40))
def test_runs_stay_together_and_each_position_has_a_different_row(n: int, run: int, seed: int) -> None:
    run = min(run, n)
    rows = RunPermutation(n, run, seed)(np.arange(n))
    assert sorted(rows.tolist()) == list(range(n))
    places = np.arange(n)
    inside = (places[1:] % run > 0) & (places[1:] < n // run * run)
    assert ((np.diff(rows) % n)[inside] == 1).all()


def test_runs_begin_at_a_different_row_for_each_seed() -> None:
    begins = {int(RunPermutation(1000, 10, seed)(np.arange(1))[0]) % 10 for seed in range(100)}
    assert begins == set(range(10))


def test_few_rows_are_permuted_individually_and_many_rows_in_runs() -> None:
    assert isinstance(permutation(65_535, 64, 0), Permutation)
    assert isinstance(permutation(65_536, 64, 0), RunPermutation)
    assert isinstance(permutation(65_536, 1, 0), Permutation)
