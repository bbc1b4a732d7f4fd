"""Shuffles a stream's rows, because neighbouring rows come from one text but a batch should contain many texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from trainer.activations.base import Empty, Indices, Pair, StreamSource, empty_rows
from trainer.activations.permutation import Permutation
from trainer.contract.errors import UserError
from trainer.contract.runs.checkpoint_manifest import BufferPlace, StreamPlace


class Chunk(NamedTuple):
    """Rows on the CPU from one `next_rows` call, the stream's state before the call, and the rows' texts, if known."""

    state: Any
    x: Tensor
    y: Tensor
    documents: Tensor | None = None

    def where(self, chosen: Tensor) -> Chunk:
        """Return the rows selected by the mask `chosen` [n]."""
        if chosen.all():
            return self
        x = self.x[chosen]
        documents = None if self.documents is None else self.documents[chosen]
        return Chunk(self.state, x, x if self.y is self.x else self.y[chosen], documents)


# Maps the text numbers of n rows, int64 [n], to a mask [n] of the rows to leave out.
LeaveOut = Callable[[Tensor], Tensor]


class StreamRows:
    """Reads any number of rows at a time from a stream, which chooses its own chunk sizes.

    Chunks read before the first `go_to` are cached until that call. Training starts with the sample's rows; thanks to
    the cache, a language model does not have to compute them twice.
    """

    def __init__(self, source: StreamSource) -> None:
        self._source, self._n_read = source, 0
        self._kept: list[Chunk] | None = []
        self._again: deque[Chunk] = deque()
        self._leave_out: LeaveOut | None = None
        self._go_on_from(self._state_of_source())

    @property
    def place(self) -> StreamPlace:
        """The position of the next row: a state of the stream, and the number of rows to skip from there."""
        return StreamPlace(self._chunk.state, self._n_used)

    def take(self, n: int) -> Pair:
        """Return the next n inputs [n, d_in] and targets [n, d_out] on the CPU, or fewer at the end of the stream."""
        return self.joined(self.take_chunks(n))

    def take_chunks(self, n: int) -> list[Chunk]:
        """Return the next n rows, or fewer at the end of the stream, in the chunks that the stream returned."""
        chunks: list[Chunk] = []
        while n and (chunk := self._some(n)):
            chunks.append(chunk)
            n -= len(chunk.x)
        return chunks

    def joined(self, chunks: Sequence[Chunk]) -> Pair:
        """Return the concatenated inputs and targets of chunks."""
        x = _joined([chunk.x for chunk in chunks], self._source.n_hooks * self._source.d_in)
        if self._source.d_out is None:
            return x, x
        return x, _joined([chunk.y for chunk in chunks], self._source.n_hooks * self._source.d_out)

    def take_some(self, n: int) -> Pair | None:
        """Return up to n of the next rows, all from one chunk and without copying, or None at the end of the stream."""
        chunk = self._some(n)
        return None if chunk is None else (chunk.x, chunk.y)

    def next_chunk(self) -> Chunk | None:
        """Return the rest of the current chunk or, if nothing is left, the next chunk; None at the stream's end."""
        return self._some(None)

    def begin_again(self, leave_out: LeaveOut | None = None) -> None:
        """Go back to the first row, and skip rows selected by `leave_out`; call this only before any `go_to`."""
        assert self._kept is not None
        self._leave_out = leave_out
        self._again = deque(self._kept)
        self._go_on_from(self._kept[0].state if self._kept else self._state_of_source())

    def go_to(self, place: StreamPlace) -> None:
        """Go to a position returned earlier by `place`; this reads and discards the rows to skip."""
        kept, self._kept = deque(self._kept or ()), None
        while kept and kept[0].state != place.state:
            kept.popleft()
        self._again = kept
        if not kept:
            self._source.restore(place.state)
        self._go_on_from(place.state)
        self.take(place.skip)

    def _some(self, n: int | None) -> Chunk | None:
        if not self._has_rows():
            return None
        last = len(self._chunk.x) if n is None else self._n_used + n
        x, y = (part[self._n_used : last] for part in self._chunk[1:3])
        documents = self._chunk.documents
        own = None if documents is None else documents[self._n_used : last]
        self._n_used += len(x)
        return Chunk(self._chunk.state, x, x if self._chunk.y is self._chunk.x else y, own)

    def _go_on_from(self, state: Any) -> None:
        nothing = torch.empty(0, 0)
        self._n_used, self._chunk = 0, Chunk(state, nothing, nothing)

    def _has_rows(self) -> bool:
        """Return whether there is another row; if the current chunk is exhausted, read the next chunk."""
        while self._n_used == len(self._chunk.x):
            chunk = self._again.popleft() if self._again else self._next_chunk()
            if chunk is None:
                return False
            if self._leave_out is not None and chunk.documents is not None:
                chunk = chunk.where(~self._leave_out(chunk.documents))
            self._n_used, self._chunk = 0, chunk
        return True

    def _next_chunk(self) -> Chunk | None:
        state, pair = self._state_of_source(), self._source.next_rows()
        if pair is None:
            return None
        x, y = pair
        self._n_read += len(x)
        self._source.report(self._n_read)
        inputs = x.cpu()
        documents = self._source.documents() if self._source.knows_texts else None
        chunk = Chunk(state, inputs, inputs if y is x else y.cpu(), documents)
        if self._kept is not None:
            self._kept.append(chunk)
        return chunk

    def _state_of_source(self) -> Any:
        # The round trip through JSON copies the state, which the stream may modify in place, and converts it to the
        # types that a checkpoint restores.
        return msgspec.json.decode(msgspec.json.encode(self._source.state()))


class MixedRows(NamedTuple):
    """Inputs and targets in shuffled order, and each row's number in the stream, counted from the first row read."""

    x: Tensor
    y: Tensor
    numbers: Indices


class ShuffleBuffer:
    """Yields a stream's rows in a seeded random order, shuffled in a buffer of `size` rows.

    The stream is divided into blocks of `size` rows. A block's rows are returned in random order. Each returned row is
    replaced in the buffer by a row from the next block, so that reads are spread evenly. Rows are only shuffled within
    their block. Therefore, the buffer's content depends only on the block's position in the stream and on how many of
    the block's rows have been returned. A checkpoint stores these two values, about a hundred bytes, instead of
    gigabytes of rows. In exchange, a resumed run rereads up to 2 × `size` rows of the stream.
    """

    def __init__(self, rows: StreamRows, size: int, *seed: int) -> None:
        self._rows, self._size, self._seed = rows, size, seed
        self._x = self._y = torch.empty(0, 0)
        self._numbers: Indices = np.zeros(size, np.int64)

    @property
    def place(self) -> BufferPlace:
        """The buffer's position in the stream."""
        return BufferPlace(self._block, self._n_gone, self._begin)

    def fill(self, place: BufferPlace) -> None:
        """Restore the buffer's content at a position by rereading the stream.

        Raise `UserError` if the stream now has fewer rows.
        """
        self._block, self._begin, self._n_gone = place.block, place.begin, 0
        self._rows.go_to(place.begin)
        self._n_block = self._read_into(self._slots_of_block(np.arange(self._size)), place.block * self._size)
        self._n_next, self._next_begin = 0, self._rows.place
        if self._n_block < place.n_gone:
            raise UserError(
                "data.source: the stream has fewer rows than when the checkpoint was saved; start a new run"
            )
        if place.n_gone:
            self._refill(self._slots(place.n_gone))
        self._n_gone = place.n_gone

    def take(self, n: int, empty: Empty = empty_rows) -> MixedRows:
        """Return the next n rows, or fewer at the end of the stream; use memory from `empty` if possible."""
        parts: list[MixedRows] = []
        while n and self._has_rows():
            slots = self._slots(min(n, self._n_block - self._n_gone))
            chosen = torch.from_numpy(slots)
            x = _selected(self._x, chosen, empty)
            y = x if self._y is self._x else _selected(self._y, chosen, empty)
            parts.append(MixedRows(x, y, self._numbers[slots]))
            self._refill(slots)
            self._n_gone += len(slots)
            n -= len(slots)
        return parts[0] if len(parts) == 1 else _joined_rows(parts)

    def _has_rows(self) -> bool:
        """Return whether there is another row; go to the next block if all rows of this block have been returned."""
        if self._n_gone == self._n_block:
            self._block, self._begin, self._n_gone = self._block + 1, self._next_begin, 0
            self._n_block, self._n_next, self._next_begin = self._n_next, 0, self._rows.place
        return self._n_gone < self._n_block

    def _slots(self, n: int) -> Indices:
        """Return the slots of the block's next n rows."""
        positions = np.arange(self._n_gone, self._n_gone + n)
        # Only a stream's last block can be shorter.
        chosen = self._order(self._block, self._n_block)(positions)
        return chosen if self._n_block == self._size else self._slots_of_block(chosen)

    def _slots_of_block(self, rows: Indices) -> Indices:
        """Return the slots of the given rows in a block.

        Rows fill slots in the order in which the previous block freed them.
        """
        return self._order(self._block - 1, self._size)(rows) if self._block else rows

    def _order(self, block: int, n: int) -> Permutation:
        return Permutation(n, *self._seed, block)

    def _refill(self, slots: Indices) -> None:
        self._n_next += self._read_into(slots, (self._block + 1) * self._size + self._n_next)

    def _read_into(self, slots: Indices, first: int) -> int:
        """Read the next rows from the stream into slots, number them from `first`, and return how many were read."""
        n = 0
        while n < len(slots) and (pair := self._rows.take_some(len(slots) - n)):
            taken = slots[n : n + len(pair[0])]
            self._put(pair, torch.from_numpy(taken))
            self._numbers[taken] = np.arange(first + n, first + n + len(taken))
            n += len(taken)
        return n

    def _put(self, pair: Pair, slots: Tensor) -> None:
        x, y = pair
        if not len(self._x):
            self._x = x.new_empty(self._size, x.shape[1])
            self._y = self._x if y is x else y.new_empty(self._size, y.shape[1])
        self._x.index_copy_(0, slots, x)
        if y is not x:
            self._y.index_copy_(0, slots, y)


def _selected(rows: Tensor, chosen: Tensor, empty: Empty) -> Tensor:
    into = empty(len(chosen), rows.shape[1], rows.dtype)
    # With `out`, `index_select` is many times faster than `rows[chosen]`.
    return torch.index_select(rows, 0, chosen, out=into)


def _joined(parts: list[Tensor], width: int) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, width)


def _joined_rows(parts: list[MixedRows]) -> MixedRows:
    nothing = torch.empty(0, 0)
    xs, ys, numbers = zip(*(parts or [MixedRows(nothing, nothing, np.zeros(0, np.int64))]), strict=True)
    x = torch.cat(xs)
    return MixedRows(x, x if ys[0] is xs[0] else torch.cat(ys), np.concatenate(numbers))
