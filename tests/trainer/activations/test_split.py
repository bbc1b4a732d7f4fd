from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.activations.order import Order
from trainer.activations.split import Split


@given(data=st.data(), n_tokens=st.integers(1, 300), seed=st.integers(0, 2**40))
def test_training_and_held_out_rows_partition_all_rows(data: st.DataObject, n_tokens: int, seed: int) -> None:
    n_held_out = data.draw(st.integers(0, n_tokens - 1))
    split = Split(n_tokens, n_held_out, seed)
    trained = split.rows(np.arange(split.n_train))
    assert len(split.held_out) == n_held_out
    assert split.n_train == n_tokens - n_held_out
    assert (np.diff(trained) > 0).all()
    assert sorted([*trained.tolist(), *split.held_out.tolist()]) == list(range(n_tokens))


@given(data=st.data(), n_tokens=st.integers(2, 200), seed=st.integers(0, 99), start=st.integers(0, 10**6))
def test_no_batch_and_no_sample_contains_a_held_out_row(
    data: st.DataObject, n_tokens: int, seed: int, start: int
) -> None:
    split = Split(n_tokens, data.draw(st.integers(1, n_tokens - 1)), seed)
    held_out = set(split.held_out.tolist())
    assert held_out.isdisjoint(Order(split, seed).token_slice(start, 3 * n_tokens).tolist())
    assert held_out.isdisjoint(split.sample(n_tokens, seed).tolist())


def test_the_seed_determines_the_held_out_rows() -> None:
    first, again, other = (Split(10_000, 500, seed) for seed in (0, 0, 1))
    assert first.held_out.tolist() == again.held_out.tolist()
    assert first.held_out.tolist() != other.held_out.tolist()


def test_held_out_rows_come_from_all_parts_of_the_data() -> None:
    parts = np.histogram(Split(100_000, 5000, 0).held_out, bins=10, range=(0, 100_000))[0]
    assert parts.min() > 400
    assert parts.max() < 600


def test_row_numbers_may_be_unordered_and_repeated() -> None:
    split = Split(20, 5, 3)
    trained = sorted(set(range(20)) - set(split.held_out.tolist()))
    numbers = np.array([14, 0, 7, 7, 3])
    assert split.rows(numbers).tolist() == [trained[number] for number in numbers]


def test_a_sample_never_repeats_a_row_and_has_at_most_all_training_rows() -> None:
    split = Split(1000, 100, 0)
    assert len(set(split.sample(500, 1).tolist())) == 500
    assert len(set(split.sample(5000, 1).tolist())) == 900
    assert split.sample(500, 1).tolist() == split.sample(500, 1).tolist()


@pytest.mark.parametrize("n_tokens", [10**9, 2**40])
def test_ordering_the_rows_of_a_huge_data_set_takes_almost_no_memory(n_tokens: int) -> None:
    split = Split(n_tokens, 32_768, 0)
    rows = Order(split, 0).token_slice(5 * n_tokens, 4096)
    assert len(set(rows.tolist())) == 4096
    assert not set(rows.tolist()) & set(split.held_out.tolist())
