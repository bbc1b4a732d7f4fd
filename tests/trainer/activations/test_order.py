from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.activations.order import Order, WindowOrder
from trainer.activations.split import Split


def order_of(n_tokens: int, seed: int) -> Order:
    return Order(Split(n_tokens, 0, seed), seed)


@given(
    n_tokens=st.integers(1, 200),
    batch_size=st.integers(1, 40),
    world_size=st.integers(1, 4),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_all_ranks_together_read_each_row_once_per_epoch(
    n_tokens: int, batch_size: int, world_size: int, epochs: int, seed: int
) -> None:
    orders = [order_of(n_tokens, seed) for _ in range(world_size)]
    rows: list[int] = []
    start = 0
    while len(rows) < epochs * n_tokens:
        for rank, order in enumerate(orders):
            rows += order.token_slice(start + rank * batch_size, batch_size).tolist()
        start += world_size * batch_size
    for epoch in range(epochs):
        assert sorted(rows[epoch * n_tokens : (epoch + 1) * n_tokens]) == list(range(n_tokens))


@given(st.integers(1, 100), st.integers(0, 500), st.integers(1, 300), st.integers(1, 299))
def test_a_global_batch_does_not_depend_on_how_it_is_split_across_ranks(
    n_tokens: int, start: int, length: int, cut: int
) -> None:
    order = order_of(n_tokens, seed=0)
    cut = min(cut, length)
    parts = (
        [order.token_slice(start, cut), order.token_slice(start + cut, length - cut)]
        if cut < length
        else [order.token_slice(start, length)]
    )
    assert np.concatenate(parts).tolist() == order.token_slice(start, length).tolist()


def test_each_seed_and_each_epoch_has_a_different_order() -> None:
    first, other_seed = order_of(1000, seed=0), order_of(1000, seed=1)
    assert first.token_slice(0, 1000).tolist() != other_seed.token_slice(0, 1000).tolist()
    assert first.token_slice(0, 1000).tolist() != first.token_slice(1000, 1000).tolist()


@pytest.mark.slow
@given(
    n_held_out=st.integers(0, 300), world_size=st.integers(1, 3), batch_size=st.integers(7, 300), seed=st.integers(0, 9)
)
def test_each_training_row_occurs_once_per_epoch_if_contiguous_runs_are_shuffled(
    n_held_out: int, world_size: int, batch_size: int, seed: int
) -> None:
    split = Split(2400, n_held_out, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.activations.permutation._FEWEST_RUNS", 2)
        order, n = Order(split, seed, run=64), split.n_train
        whole = order.token_slice(0, 2 * n).tolist()
        step = world_size * batch_size
        shared = [
            row
            for start in range(0, 2 * n, step)
            for rank in range(world_size)
            for row in order.token_slice(start + rank * batch_size, batch_size).tolist()
        ]
    assert shared[: 2 * n] == whole
    training = sorted({*range(2400)} - {*split.held_out.tolist()})
    assert sorted(whole[:n]) == sorted(whole[n:]) == training
    assert whole[:n] != whole[n:]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=9),
    n_shards=st.integers(1, 4),
    n_held_out=st.integers(0, 20),
    length=st.integers(1, 50),
)
def test_windows_use_each_training_row_once_per_epoch_from_the_shards_they_keep(
    sizes: list[int], n_shards: int, n_held_out: int, length: int
) -> None:
    starts, n = [sum(sizes[:number]) for number in range(len(sizes))], sum(sizes)
    split = Split(n, min(n_held_out, sizes[0] - 1), 3, n_first=sizes[0])
    order = WindowOrder(split, 5, 1, starts, n_shards)
    rows: list[int] = []
    while len(rows) < 2 * split.n_train:
        batch = order.token_slice(len(rows), length)
        kept = [row for first, last in order.spans(len(rows), length) for row in range(first, last)]
        assert {*batch.tolist()} <= {*kept}
        rows += batch.tolist()
    expected = sorted({*range(n)} - {*split.held_out.tolist()})
    for epoch in range(2):
        assert sorted(rows[epoch * split.n_train : (epoch + 1) * split.n_train]) == expected
