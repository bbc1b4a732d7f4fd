"""Mixes the rows of a stream, whose neighbours are of one text, so that each batch has rows of many."""

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
    """Rows that a stream returned together, on the CPU; its state before them; and their texts, if it knows them."""

    state: Any
    x: Tensor
    y: Tensor
    documents: Tensor | None = None

    def where(self, chosen: Tensor) -> Chunk:
        """Return the chosen rows, bool [n]."""
        if chosen.all():
            return self
        x = self.x[chosen]
        documents = None if self.documents is None else self.documents[chosen]
        return Chunk(self.state, x, x if self.y is self.x else self.y[chosen], documents)


# Maps the text numbers of rows, int64 [n], to whether they are left out, bool [n].
LeaveOut = Callable[[Tensor], Tensor]


class StreamRows:
    """Any number of rows at a time of a stream that gives as many as it likes.

    What it gives before the first `go_to` is kept until then: the rows of the sample are the first that are trained on,
    and a model need not read them twice.
    """

    def __init__(self, source: StreamSource) -> None:
        self._source = source
        self._kept: list[Chunk] | None = []
        self._again: deque[Chunk] = deque()
        self._leave_out: LeaveOut | None = None
        self._go_on_from(self._state_of_source())

    @property
    def place(self) -> StreamPlace:
        """Where the next row is: a state of the stream, and the number of rows to skip from there."""
        return StreamPlace(self._chunk.state, self._n_used)

    def take(self, n: int) -> Pair:
        """Return the next n inputs [n, d_in] and targets [n, d_out] on the CPU; fewer where the stream ends."""
        return self.joined(self.take_chunks(n))

    def take_chunks(self, n: int) -> list[Chunk]:
        """Return the next n rows in the chunks that the stream returned; fewer at its end."""
        chunks: list[Chunk] = []
        while n and (chunk := self._some(n)):
            chunks.append(chunk)
            n -= len(chunk.x)
        return chunks

    def joined(self, chunks: Sequence[Chunk]) -> Pair:
        """Return the inputs and targets of chunks."""
        x = _joined([chunk.x for chunk in chunks], self._source.n_hooks * self._source.d_in)
        if self._source.d_out is None:
            return x, x
        return x, _joined([chunk.y for chunk in chunks], self._source.n_hooks * self._source.d_out)

    def take_some(self, n: int) -> Pair | None:
        """Return up to n of the next rows, those that the stream gave at once, without a copy; None where it ends."""
        chunk = self._some(n)
        return None if chunk is None else (chunk.x, chunk.y)

    def next_chunk(self) -> Chunk | None:
        """Return the rest of the current chunk, or the next one; None at the end of the stream."""
        return self._some(None)

    def begin_again(self, leave_out: LeaveOut | None = None) -> None:
        """Return to the first row, before any `go_to`; leave out the rows of some texts from now on."""
        assert self._kept is not None
        self._leave_out = leave_out
        self._again = deque(self._kept)
        self._go_on_from(self._kept[0].state if self._kept else self._state_of_source())

    def go_to(self, place: StreamPlace) -> None:
        """Go to where the rows were when this was their `place`; what is skipped is read."""
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
        """Tell whether a row is left, asking the stream for more where those that it gave are used up."""
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
        inputs = x.cpu()
        documents = self._source.documents() if self._source.knows_texts else None
        chunk = Chunk(state, inputs, inputs if y is x else y.cpu(), documents)
        if self._kept is not None:
            self._kept.append(chunk)
        return chunk

    def _state_of_source(self) -> Any:
        # As a checkpoint would give it back: what the stream changes later in place is not changed here.
        return msgspec.json.decode(msgspec.json.encode(self._source.state()))


class MixedRows(NamedTuple):
    """Inputs and targets as a buffer gives them out, and the number of each, from 0 at the first that it read."""

    x: Tensor
    y: Tensor
    numbers: Indices


class ShuffleBuffer:
    """Gives out the rows of a stream in a seeded order, mixed over `size` rows, which it holds.

    The stream is cut into blocks of `size` rows. Those of a block are given out in a random order, and the slot of each
    that goes takes a row of the next block, so that reading is spread evenly. A row is mixed with its own block only;
    so all that has gone is known from where the block began in the stream and how many of its rows went. A checkpoint
    keeps that, some hundred bytes, and none of the rows, which could be gigabytes. The price is paid by a run that is
    resumed: it reads up to 2 × `size` rows of the stream again.
    """

    def __init__(self, rows: StreamRows, size: int, *seed: int) -> None:
        self._rows, self._size, self._seed = rows, size, seed
        self._x = self._y = torch.empty(0, 0)
        self._numbers: Indices = np.zeros(size, np.int64)

    @property
    def place(self) -> BufferPlace:
        """How far the buffer is."""
        return BufferPlace(self._block, self._n_gone, self._begin)

    def fill(self, place: BufferPlace) -> None:
        """Hold what the buffer held when this was its place; read it from the stream.

        Raise `UserError` where the stream has fewer rows than it had.
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
        """Return the next n rows, fewer only where the stream has ended, if possible in what `empty` gives."""
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
        """Tell whether a row is left, going to the next block where all of this one are gone."""
        if self._n_gone == self._n_block:
            self._block, self._begin, self._n_gone = self._block + 1, self._next_begin, 0
            self._n_block, self._n_next, self._next_begin = self._n_next, 0, self._rows.place
        return self._n_gone < self._n_block

    def _slots(self, n: int) -> Indices:
        """Return where the next n rows of the block to go are."""
        positions = np.arange(self._n_gone, self._n_gone + n)
        # Only the last block of a stream can be shorter.
        chosen = self._order(self._block, self._n_block)(positions)
        return chosen if self._n_block == self._size else self._slots_of_block(chosen)

    def _slots_of_block(self, rows: Indices) -> Indices:
        """Return where some rows of the block are: where rows of the block before went, in that order."""
        return self._order(self._block - 1, self._size)(rows) if self._block else rows

    def _order(self, block: int, n: int) -> Permutation:
        return Permutation(n, *self._seed, block)

    def _refill(self, slots: Indices) -> None:
        self._n_next += self._read_into(slots, (self._block + 1) * self._size + self._n_next)

    def _read_into(self, slots: Indices, first: int) -> int:
        """Put the next rows of the stream, the first of which has this number, into slots; return how many came."""
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
    # Many times as fast as `rows[chosen]`.
    return torch.index_select(rows, 0, chosen, out=into)


def _joined(parts: list[Tensor], width: int) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, width)


def _joined_rows(parts: list[MixedRows]) -> MixedRows:
    nothing = torch.empty(0, 0)
    xs, ys, numbers = zip(*(parts or [MixedRows(nothing, nothing, np.zeros(0, np.int64))]), strict=True)
    x = torch.cat(xs)
    return MixedRows(x, x if ys[0] is xs[0] else torch.cat(ys), np.concatenate(numbers))
