from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.activations.base import Indices
from trainer.activations.batches import Batches
from trainer.activations.order import Order
from trainer.activations.shards import Shards


@contextlib.contextmanager
def open_batches(
    source: Shards, *, batch_size: int = 64, rank: int = 0, world_size: int = 1, start: int = 0
) -> Iterator:
    batches = Batches(
        source,
        Order(source.n_tokens, seed=0),
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        start=start,
        device=torch.device("cpu"),
    )
    with contextlib.closing(batches):
        yield batches


def rows_of(tensor: Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in tensor.tolist()}


def test_two_ranks_share_the_batch_that_one_rank_would_have(activations: Path) -> None:
    source = Shards(path=str(activations))
    with (
        open_batches(source, batch_size=128) as whole,
        open_batches(source, rank=0, world_size=2) as first,
        open_batches(source, rank=1, world_size=2) as second,
    ):
        for _ in range(50):  # beyond the end of the second epoch
            assert rows_of(whole.next()) == rows_of(first.next()) | rows_of(second.next())


def test_reading_goes_on_exactly_at_a_position(activations: Path) -> None:
    source = Shards(path=str(activations))
    with open_batches(source) as batches:
        seen = [batches.next() for _ in range(60)]
    with open_batches(source, start=57 * 64) as batches:
        assert torch.equal(batches.next(), seen[57])
        assert torch.equal(batches.next(), seen[58])


def test_the_next_batch_is_read_while_this_one_is_used(activations: Path, eventually) -> None:
    with open_batches(Shards(path=str(activations))) as batches:
        batches.next()
        eventually(batches._ready.full)


def test_what_stops_the_reading_reaches_the_training(activations: Path) -> None:
    class Failing(Shards):
        def rows(self, indices: Indices) -> Tensor:
            raise OSError("the disk went away")

    with open_batches(Failing(path=str(activations))) as batches, pytest.raises(OSError, match="the disk went away"):
        batches.next()


def test_closing_ends_the_reading_thread(activations: Path) -> None:
    before = set(threading.enumerate())
    with open_batches(Shards(path=str(activations))) as batches:
        batches.next()
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before
