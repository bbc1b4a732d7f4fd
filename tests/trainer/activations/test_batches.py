from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.activations.base import Empty, Indices, empty_rows
from trainer.activations.batches import Batches
from trainer.activations.micro_batches import Cut
from trainer.activations.shards import Shards
from trainer.activations.training_data import IndexedData, ReadRows
from trainer.parallel.group import Group
from trainer.parallel.threads import Threads, on_all


@contextlib.contextmanager
def open_batches(source: Shards, cut: Cut | None = None, start: int = 0) -> Iterator:
    data = IndexedData(source, 0, 0, Group())
    batches = Batches(data, cut or Cut(64), start=start, device=torch.device("cpu"))
    with contextlib.closing(batches):
        yield batches


def rows_of(tensor: Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in tensor.tolist()}


@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 3.0)])
def test_two_ranks_split_the_batch_a_single_rank_would_get(shares: tuple[float, ...], activations: Path) -> None:
    source = Shards(path=str(activations))
    with (
        open_batches(source, Cut(128)) as whole,
        open_batches(source, Cut(128, 1, shares, 0)) as first,
        open_batches(source, Cut(128, 1, shares, 1)) as second,
    ):
        for _ in range(50):  # 50 batches cover more than two epochs
            parts = first.next(), second.next()
            assert rows_of(whole.next().hooks[0][0]) == rows_of(parts[0].hooks[0][0]) | rows_of(parts[1].hooks[0][0])
            assert [part.of_all for part in parts] == [128, 128]


def test_reading_resumes_exactly_where_it_stopped(activations: Path) -> None:
    source = Shards(path=str(activations))
    with open_batches(source) as batches:
        drawn = [batches.next() for _ in range(60)]
    with open_batches(source, start=57 * 64) as batches:
        for expected in drawn[57:59]:
            assert torch.equal(batches.next().hooks[0][0], expected.hooks[0][0])


def test_the_next_batch_is_read_while_the_current_one_is_in_use(activations: Path, eventually) -> None:
    with open_batches(Shards(path=str(activations))) as batches:
        batches.next()
        eventually(batches._ready.full)


def test_a_read_error_is_raised_by_the_next_batch(activations: Path) -> None:
    class Failing(Shards):
        def pairs(self, indices: Indices, empty: Empty = empty_rows) -> tuple[Tensor, Tensor]:
            raise OSError("the disk went away")

    with open_batches(Failing(path=str(activations))) as batches, pytest.raises(OSError, match="the disk went away"):
        batches.next()


def test_ranks_reading_together_stop_at_the_same_batch_and_resume_from_it(activations: Path) -> None:
    class Together(IndexedData):
        reads_together = True

        def __init__(self, source: Shards, group: Threads) -> None:
            super().__init__(source, 0, 0, Group())
            self._peers, self.n_read = group, 0

        def read(self, position: int, n: int, empty: Empty = empty_rows) -> ReadRows:
            self.n_read += 1
            (first, second) = self._peers.gather(torch.tensor([position])).flatten().tolist()
            assert first == second == position
            return super().read(position, n, empty)

    def train(group: Threads) -> tuple[list[Tensor], int]:
        data, taken = Together(Shards(path=str(activations)), group), []
        for start in range(0, 12, 3):
            batches = Batches(data, Cut(64), start=64 * start, device=torch.device("cpu"))
            for n in range(3):
                # Delay one rank so that the other rank gets ahead.
                time.sleep(0.02 * group.index * n)
                taken.append(batches.next().hooks[0][0])
            batches.close()
        return taken, data.n_read

    (first, n_first), (second, n_second) = on_all(2, train, timeout_s=60)
    assert n_first == n_second
    with open_batches(Shards(path=str(activations))) as batches:
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, batches.next().hooks[0][0])


def test_after_a_failure_a_reader_waiting_for_another_rank_can_be_abandoned(activations: Path) -> None:
    class Waiting(IndexedData):
        reads_together = True

        def read(self, position: int, n: int, empty: Empty = empty_rows) -> ReadRows:
            never.wait(60)
            raise OSError("too late")

    never = threading.Event()
    batches = Batches(
        Waiting(Shards(path=str(activations)), 0, 0, Group()), Cut(64), start=0, device=torch.device("cpu")
    )
    batches.abandon()
    assert batches._thread.is_alive()
    never.set()
    batches._thread.join(60)
    assert not batches._thread.is_alive()


def test_the_target_of_an_sae_is_its_input(activations: Path) -> None:
    with open_batches(Shards(path=str(activations))) as batches:
        (x, y), *_ = batches.next().hooks
    assert y is x
    assert (x.dtype, x.shape) == (torch.float32, (64, 16))


def test_a_transcoder_gets_each_row_with_its_target(activations: Path, tmp_path: Path) -> None:
    path = str(activations)
    targets = 2 * Shards(path=path).rows(np.arange(3000)).float()[:, :5]
    (tmp_path / "targets").mkdir()
    save_file({"activations": targets.contiguous()}, tmp_path / "targets" / "one.safetensors")
    with open_batches(Shards(path=path, target_path=str(tmp_path / "targets"))) as batches:
        for _ in range(50):
            (x, y), *_ = batches.next().hooks
            assert torch.equal(y, 2 * x[:, :5])


def test_only_time_without_a_batch_counts_as_waiting(activations: Path, eventually) -> None:
    asked = threading.Event()

    class Slow(Shards):
        def pairs(self, indices: Indices, empty: Empty = empty_rows) -> tuple[Tensor, Tensor]:
            asked.wait(60)
            return super().pairs(indices, empty)

    with open_batches(Slow(path=str(activations))) as batches:
        threading.Timer(0.2, asked.set).start()
        batches.next()
        assert batches.waited_s >= 0.15
        eventually(batches._ready.full)
        before = batches.waited_s
        batches.next()
        assert batches.waited_s - before < 0.1


def test_closing_stops_the_reader_thread(activations: Path) -> None:
    before = set(threading.enumerate())
    with open_batches(Shards(path=str(activations))) as batches:
        batches.next()
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before
