from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.activations.base import Pair, StreamSource
from trainer.activations.shuffle_buffer import MixedRows, ShuffleBuffer, StreamRows
from trainer.contract.errors import UserError
from trainer.contract.runs.checkpoint_manifest import BufferPlace


class Counting(StreamSource):
    """A stream in which row j is [j], with target [-j]. Every second call returns no rows."""

    d_in, d_out = 1, 1

    def __init__(self, n_rows: int, chunk: int) -> None:
        self._n_rows, self._chunk = n_rows, chunk
        self.n_given = 0
        self.begin(0, 1, torch.device("cpu"))

    def begin(self, rank: int, n_ranks: int, device: torch.device) -> None:
        self._place = {"next": 0, "is_empty": False}

    def next_rows(self) -> Pair | None:
        first = self._place["next"]
        if first >= self._n_rows:
            return None
        # Modify the previously returned state, so that the test fails if the caller did not copy it.
        self._place["is_empty"] = not self._place["is_empty"]
        last = min(first + self._chunk, self._n_rows) if self._place["is_empty"] else first
        self._place["next"] = last
        self.n_given += last - first
        x = torch.arange(float(first), float(last))[:, None]
        return x, -x

    def state(self) -> Any:
        return self._place

    def restore(self, state: Any) -> None:
        self._place = dict(state)


def buffer_of(n_rows: int, size: int, *, chunk: int = 7, at: BufferPlace | None = None) -> ShuffleBuffer:
    rows = StreamRows(Counting(n_rows, chunk))
    buffer = ShuffleBuffer(rows, size, 3, 0)
    buffer.fill(at or BufferPlace(0, 0, rows.place))
    return buffer


def numbers_of(taken: list[MixedRows]) -> list[int]:
    for x, y, numbers in taken:
        assert torch.equal(y, -x)
        assert x.flatten().tolist() == numbers.tolist()
    return [number for rows in taken for number in rows.numbers.tolist()]


SIZES = {"size": st.integers(1, 40), "chunk": st.integers(1, 30), "lengths": st.lists(st.integers(1, 60), max_size=12)}


@given(n_held_out=st.integers(0, 40), n_sample=st.integers(0, 80), **SIZES)
def test_rows_read_for_measurements_before_a_run_are_not_read_again(
    n_held_out: int, n_sample: int, size: int, chunk: int, lengths: list[int]
) -> None:
    source, n_rows = Counting(200, chunk), 200
    rows = StreamRows(source)
    rows.take(n_held_out)
    place = rows.place
    rows.take(n_sample)
    buffer = ShuffleBuffer(rows, size, 3, 0)
    buffer.fill(BufferPlace(0, 0, place))
    taken = [buffer.take(length) for length in [*lengths, n_rows]]
    numbers = sorted(int(row) for part in taken for row in part.x)
    assert numbers == list(range(n_held_out, n_rows))
    assert source.n_given == n_rows


@given(n_rows=st.integers(0, 200), **SIZES)
def test_every_row_occurs_once_until_the_stream_ends(n_rows: int, size: int, chunk: int, lengths: list[int]) -> None:
    buffer = buffer_of(n_rows, size, chunk=chunk)
    taken = [buffer.take(length) for length in lengths]
    numbers = numbers_of(taken)
    assert len(numbers) == min(n_rows, sum(lengths))
    rest = numbers_of([buffer.take(n_rows + 1)])
    assert sorted(numbers + rest) == list(range(n_rows))
    assert not len(buffer.take(1).x)


@given(n_rows=st.integers(1, 400), other_chunk=st.integers(1, 30), **SIZES)
def test_a_refilled_buffer_continues_exactly_where_the_first_one_stopped(
    n_rows: int, other_chunk: int, size: int, chunk: int, lengths: list[int]
) -> None:
    buffer = buffer_of(n_rows, size, chunk=chunk)
    for length in lengths:
        buffer.take(length)
    place = buffer.place
    expected = [buffer.take(13), buffer.take(size), buffer.take(n_rows)]
    again = buffer_of(n_rows, size, chunk=other_chunk, at=place)
    assert again.place == place
    assert numbers_of([again.take(len(rows.x)) for rows in expected]) == numbers_of(expected)


def test_a_batch_mixes_rows_from_an_entire_block_but_only_from_adjacent_blocks() -> None:
    buffer = buffer_of(10_000, 1000)
    first, second = (np.sort(buffer.take(500).numbers) for _ in range(2))
    assert sorted([*first, *second]) == list(range(1000))
    assert np.histogram(first, bins=5, range=(0, 1000))[0].min() > 60
    following = buffer.take(1000).numbers
    assert sorted(following) == list(range(1000, 2000))
    assert np.abs(np.diff(following)).mean() > 200


def test_a_stream_that_has_shrunk_since_it_was_read_is_refused() -> None:
    buffer = buffer_of(100, 40)
    buffer.take(75)
    with pytest.raises(UserError, match=r"^data\.source: the stream has fewer rows than when"):
        buffer_of(50, 40, at=buffer.place)
