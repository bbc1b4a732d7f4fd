"""What a trainer gets of a source of activations, stored or a stream: batches, held-out rows and a sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from trainer.activations.base import (
    Empty,
    IndexedSource,
    Pair,
    Source,
    StreamSource,
    are_finite,
    empty_rows,
    of_each_hook,
)
from trainer.activations.mixture import MixedOrder, MixedSplit
from trainer.activations.order import Order
from trainer.activations.shuffle_buffer import ShuffleBuffer, StreamRows
from trainer.activations.split import Split
from trainer.contract.errors import UserError
from trainer.contract.runs.checkpoint_manifest import BufferPlace, State
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group, gather_bytes

# Rows of a sample: OpenAI's number for b_dec; 300 MB at d_in 2304.
SAMPLE_TOKENS = 32_768


class Read(NamedTuple):
    """Rows of a batch as they are stored, and how far a stream is with them."""

    x: Tensor
    y: Tensor
    mark: Mark | None = None


class Mark(NamedTuple):
    """How far a stream is after a batch that began at `position` tokens; `bad_row` of it, if any, is not finite."""

    position: int
    place: BufferPlace
    bad_row: int | None


class HookRows(ABC):
    """A sample of the rows of one hook, and those that are never trained on."""

    # Rows kept back on all ranks together.
    n_held_out: int

    @abstractmethod
    def sample(self, seed: int) -> Pair:
        """Return at most `SAMPLE_TOKENS` training rows, the same on all ranks."""

    @abstractmethod
    def bad_in_sample(self, index: int, seed: int) -> str:
        """Say in a sentence that a row of that sample is not finite."""

    @abstractmethod
    def held_out(self, batch_size: int) -> Iterator[Pair]:
        """Yield this rank's part of the rows that are never trained on, in batches."""


class TrainingData(ABC):
    """The rows that one rank trains on, in their order; of several hooks side by side, as their source has them."""

    # Rows kept back on all ranks together.
    n_held_out: int
    # Whether `read` waits for other ranks, which have to read as often.
    reads_together: bool = False

    def __init__(self, n_hooks: int) -> None:
        self.n_hooks = n_hooks

    @abstractmethod
    def of_hook(self, hook: int) -> HookRows:
        """Return a hook's sample and what is held out, by its number."""

    @abstractmethod
    def rewind(self) -> None:
        """Prepare to read on after the last batch of which `note_trained` was told, whatever was read ahead of it."""

    @abstractmethod
    def read(self, position: int, n: int, empty: Empty = empty_rows) -> Read:
        """Return this rank's next n rows, where `position` tokens of all ranks come before the first of them.

        They are read into what `empty` gives where that can be.
        """

    @abstractmethod
    def note_trained(self, rows: Read) -> None:
        """Note that a batch is being trained on."""

    @abstractmethod
    def bad_row(self, since: int, now: int, tokens_per_step: int) -> str | None:
        """Say in a sentence which row that was trained on between two positions is not finite; None without one.

        Ranks that learn the same SAEs call this alike.
        """

    def stream_places(self) -> list[BufferPlace] | msgspec.UnsetType:
        """Return how far a stream is on each rank with tokens of its own, for a checkpoint; all ranks call it alike."""
        return msgspec.UNSET


def open_data(source: Source, job: JobConfig, parallel: Parallel, resumed: State | None = None) -> TrainingData:
    """Return what one rank trains on; `resumed` is the state of the checkpoint that a run goes on from.

    Raise `UserError` where a stream cannot go on from there.
    """
    n_held_out, seed = job.data.held_out(source.n_tokens, parallel.world_size), job.train.seed
    if isinstance(source, StreamSource):
        return StreamData(source, n_held_out, seed, parallel, resumed.stream if resumed else None)
    assert isinstance(source, IndexedSource)
    if parallel.device.type != "cpu":
        source.read_by_all_threads()
    return IndexedData(source, n_held_out, seed, parallel.data)


class IndexedData(TrainingData):
    """Stored rows, in an endless sequence of epochs; a position is all that a checkpoint has to remember."""

    def __init__(self, source: IndexedSource, n_held_out: int, seed: int, group: Group) -> None:
        super().__init__(source.n_hooks)
        self._source, self._group = source, group
        self.split, self._order = _order(source, n_held_out, seed)
        self.n_held_out = len(self.split.held_out)

    def of_hook(self, hook: int) -> HookRows:
        return _IndexedRows(self._source.of_hook(hook), self.split, self._group)

    def rewind(self) -> None:
        """Do nothing: any position can be read."""

    def read(self, position: int, n: int, empty: Empty = empty_rows) -> Read:
        return Read(*self._source.pairs(self._order.stretch(position, n), empty))

    def note_trained(self, rows: Read) -> None:
        """Do nothing: rows can be read again."""

    def bad_row(self, since: int, now: int, tokens_per_step: int) -> str | None:
        steps = (self._order.stretch(start, tokens_per_step) for start in range(since, now, tokens_per_step))
        rows = (self._source.first_not_finite(indices) for indices in steps)
        return next((_bad_row(self._source, row) for row in rows if row is not None), None)


class _IndexedRows(HookRows):
    """The stored rows of one hook."""

    def __init__(self, source: IndexedSource, split: Split | MixedSplit, group: Group) -> None:
        self._source, self._split, self._group = source, split, group
        self.n_held_out = len(split.held_out)

    def sample(self, seed: int) -> Pair:
        return self._source.pairs(self._split.sample(SAMPLE_TOKENS, seed))

    def bad_in_sample(self, index: int, seed: int) -> str:
        return _bad_row(self._source, int(np.sort(self._split.sample(SAMPLE_TOKENS, seed))[index]))

    def held_out(self, batch_size: int) -> Iterator[Pair]:
        own = self._split.held_out[self._group.index :: self._group.size]
        for start in range(0, len(own), batch_size):
            yield self._source.pairs(own[start : start + batch_size])


def _bad_row(source: IndexedSource, row: int) -> str:
    return f"{source.place} holds NaN or infinite values in {source.name_of(row)}"


def _order(source: IndexedSource, n_held_out: int, seed: int) -> tuple[Split | MixedSplit, Order | MixedOrder]:
    if len(source.sizes) < 2:
        split = Split(source.n_tokens, n_held_out, seed)
        return split, Order(split, seed, source.run)
    mixed = MixedSplit(source.sizes, source.weights, n_held_out, seed)
    return mixed, MixedOrder(mixed, seed, source.run)


class StreamData(TrainingData):
    """Rows of a stream, each trained on once, mixed by a `ShuffleBuffer`; every rank reads a part of its own.

    The first rows of each part are held out. They and the sample, which is of the rows after them, stay in memory, and
    are read again by a run that is resumed. A checkpoint keeps how far each part is, so that parts stay as they are: a
    run is resumed by as many ranks with tokens of their own as it had, or not at all. Where shares of the tokens
    change, a step has other rows than it would have had; none is trained on twice.
    """

    def __init__(
        self,
        source: StreamSource,
        n_held_out: int,
        seed: int,
        parallel: Parallel,
        places: list[BufferPlace] | msgspec.UnsetType | None,
    ) -> None:
        super().__init__(source.n_hooks)
        self._source, self._group, self._device = source, parallel.data, parallel.device
        self.n_held_out = n_held_out
        source.begin(self._group.index, self._group.size, parallel.device)
        if source.is_divided and (peers := parallel.neighbours_with_these_tokens()).size > 1:
            source.divide(peers)
            self.reads_together = True
        rows = StreamRows(source)
        n_own = len(range(self._group.index, n_held_out, self._group.size))
        self._held_out = of_each_hook(rows.take(n_own), source.n_hooks)
        first = BufferPlace(0, 0, rows.place)
        sample = self._whole_sample(rows.take(-(-SAMPLE_TOKENS // self._group.size)))
        self._sample = of_each_hook(sample, source.n_hooks)
        self._place = first if places is None else _place_of(self._group, places)
        self._buffer = ShuffleBuffer(rows, source.shuffle_tokens, seed, self._group.index)
        self._is_filled = False
        self._bad: list[Mark] = []

    def of_hook(self, hook: int) -> HookRows:
        return _StreamHook(self._held_out[hook], self._sample[hook], self.n_held_out, self._bad_in_sample)

    def rewind(self) -> None:
        self._is_filled = False

    def read(self, position: int, n: int, empty: Empty = empty_rows) -> Read:
        if not self._is_filled:
            self._buffer.fill(self._place)
            self._is_filled = True
        x, y, numbers = self._buffer.take(n, empty)
        if len(x) < n:
            raise self._ended()
        finite = torch.stack([are_finite(*pair) for pair in of_each_hook((x, y), self.n_hooks)]).all(dim=0)
        bad = numbers[~finite.numpy()]
        return Read(x, y, Mark(position, self._buffer.place, int(bad.min()) if len(bad) else None))

    def note_trained(self, rows: Read) -> None:
        assert rows.mark is not None
        self._place = rows.mark.place
        # Only the first is named, and there may be one in every batch.
        if rows.mark.bad_row is not None and not self._bad:
            self._bad.append(rows.mark)

    def bad_row(self, since: int, now: int, tokens_per_step: int) -> str | None:
        self._bad = [mark for mark in self._bad if mark.position >= since]
        rows = (mark.bad_row for mark in self._bad if mark.position < now and mark.bad_row is not None)
        own = torch.tensor(min(rows, default=-1), device=self._device)
        of_parts = self._group.gather(own).tolist()
        return next((self._bad_sentence(row, part) for part, row in enumerate(of_parts) if row >= 0), None)

    def stream_places(self) -> list[BufferPlace]:
        encoded = gather_bytes(self._group, msgspec.json.encode(self._place), self._device)
        return [msgspec.json.decode(of_part, type=BufferPlace) for of_part in encoded]

    def _whole_sample(self, own: Pair) -> Pair:
        """Return the same number of rows of each part, on all ranks."""
        n = int(self._group.gather(torch.tensor(len(own[0]), device=self._device)).min())
        if not n:
            raise self._ended()
        x, y = (self._of_all_parts(part[:n]) for part in own)
        return x, x if own[1] is own[0] else y

    def _of_all_parts(self, rows: Tensor) -> Tensor:
        # As bytes, since not every library sends every type of number.
        as_bytes = rows.contiguous().view(torch.uint8).to(self._device)
        return self._group.gather(as_bytes).cpu().flatten(0, 1).view(rows.dtype)

    def _bad_in_sample(self, index: int) -> str:
        n_each = len(self._sample[0][0]) // self._group.size
        return self._bad_sentence(index % n_each, index // n_each)

    def _bad_sentence(self, row: int, part: int) -> str:
        """Say that a row, counted from the first that is not held out, is not finite."""
        number = row + len(range(part, self.n_held_out, self._group.size))
        return f"{self._source.place} holds NaN or infinite values in row {number}{self._of_part(part)}"

    def _ended(self) -> UserError:
        where = f"{self._source.place} has ended{self._of_part(self._group.index)}"
        return UserError(f"train.n_tokens: {where} before the run; train on fewer tokens, in a new run")

    def _of_part(self, part: int) -> str:
        return f" (part {part + 1} of {self._group.size})" if self._group.size > 1 else ""


class _StreamHook(HookRows):
    """What a stream keeps of one hook, in memory."""

    def __init__(self, held_out: Pair, sample: Pair, n_held_out: int, bad: Callable[[int], str]) -> None:
        self._held_out, self._sample, self.n_held_out, self._bad = held_out, sample, n_held_out, bad

    def sample(self, seed: int) -> Pair:
        return self._sample

    def bad_in_sample(self, index: int, seed: int) -> str:
        return self._bad(index)

    def held_out(self, batch_size: int) -> Iterator[Pair]:
        x, y = self._held_out
        for start in range(0, len(x), batch_size):
            inputs = x[start : start + batch_size]
            yield inputs, inputs if y is x else y[start : start + batch_size]


def _place_of(group: Group, places: list[BufferPlace] | msgspec.UnsetType) -> BufferPlace:
    """Return this rank's place; raise `UserError` where the checkpoint is of other parts."""
    if isinstance(places, msgspec.UnsetType):
        raise UserError("data.source: the checkpoint is of a run on stored data, not on a stream; start a new run")
    if len(places) != group.size:
        raise UserError(
            f"launch.gpus: the stream was read in {len(places)} parts, one for each rank with tokens of its own, and "
            f"{group.size} cannot go on with them; resume on as many ranks as before"
        )
    return places[group.index]
