"""Provides batches, held-out rows and a sample of the rows in a stored or streamed activation source."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from trainer.activations.base import (
    Empty,
    IndexedSource,
    Indices,
    Pair,
    Source,
    Span,
    StreamSource,
    are_finite,
    empty_rows,
    of_each_hook,
)
from trainer.activations.mixture import MixedOrder, MixedSplit
from trainer.activations.order import Order, WindowOrder
from trainer.activations.permutation import Words
from trainer.activations.row_readers import own_rows
from trainer.activations.shuffle_buffer import Chunk, ShuffleBuffer, StreamRows
from trainer.activations.split import BLOCK, Split, TooFewTexts, halves_of, split_of
from trainer.activations.texts import keys_of, seed_key
from trainer.contract.errors import UserError
from trainer.contract.object_cache import RowCache
from trainer.contract.runs.checkpoint_manifest import BufferPlace, CheckpointState
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sources import HoldOut
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group, gather_bytes

# The number of rows in a sample, which takes 300 MB at d_in = 2304. OpenAI initialises b_dec from the same number of
# rows.
SAMPLE_TOKENS = 32_768
_HELD_OUT_OTHERS = (
    "data.hold_out: the held-out rows would change, since added shards do not record their texts or there are more "
    "ranks than held-out rows; undo the change, or start a new run"
)
# The fraction of texts held out at the start of a stream. To find 32,768 held-out rows, 8 x 32,768 rows must be read.
# The shuffle buffer needs that many rows anyway, so the model computes no extra rows.
SHARE_OF_TEXTS = 1 / 8
# The maximum number of rows to read per held-out row, and the minimum fraction of the requested rows that must be
# found.
MOST_READ, LEAST_OF_TEXTS = 16, 0.25
# The indices of the two halves of the held-out rows.
HALVES = (0, 1)


class ReadRows(NamedTuple):
    """A batch's rows, encoded or in their stored dtype, and, for a stream, the position after the batch."""

    x: Tensor
    y: Tensor
    mark: Mark | None = None


class Mark(NamedTuple):
    """A stream's position after a batch; `bad_row` is the batch's first non-finite row, or None.

    `position` is the total number of tokens, over all ranks, before the batch.
    """

    position: int
    place: BufferPlace
    bad_row: int | None


class Clusters(NamedTuple):
    """A label for each row, int64 [n]; rows from one text, or from one block of neighbours, share a label."""

    labels: Indices
    of: Literal["texts", "blocks"]


class HookRows(ABC):
    """A sample of one hook's training rows, and the hook's held-out rows, which are never used for training."""

    # The total number of held-out rows on all ranks, and how they were chosen.
    n_held_out: int
    hold_out: str
    # The encoding of stored rows, for the report card; "" for rows stored as numbers.
    stored_as: str = ""

    @abstractmethod
    def sample(self, seed: int) -> Pair:
        """Return at most `SAMPLE_TOKENS` training rows, the same on all ranks."""

    @abstractmethod
    def training_rows(self, n: int, seed: int, batch_size: int) -> Iterator[Pair]:
        """Yield at most n random training rows in batches; fewer for a stream, whose rows are only in memory once."""

    @abstractmethod
    def bad_in_sample(self, index: int, seed: int) -> str:
        """Return an error message for the non-finite row at `index` in the sample."""

    @abstractmethod
    def held_out(self, batch_size: int, half: int | None = None) -> Iterator[Pair]:
        """Yield this rank's share of the held-out rows in batches; with `half`, yield only the rows in that half.

        `half` is 0 or 1. The halves do not depend on the number of ranks.
        """

    @abstractmethod
    def of_half(self, half: int) -> Indices:
        """Return the positions of one half's rows among the rows that `held_out` yields."""

    @abstractmethod
    def clusters(self) -> Clusters:
        """Return the clusters of dependent rows among the rows that `held_out` yields."""

    @abstractmethod
    def clusters_of_sample(self, seed: int) -> Clusters:
        """Return the clusters of dependent rows in a sample."""


class TrainingData(ABC):
    """The rows that one rank trains on, in order; rows are concatenated over hooks, as in the source."""

    # The total number of held-out rows on all ranks, how they are chosen, and the number of their texts, if known.
    n_held_out: int
    hold_out: str = "rows"
    n_texts: int = 0
    # The number of stored training rows, or None for a stream, whose length is unknown.
    n_train: int | None = None
    # Whether `read` waits for other ranks. If so, all ranks must call it the same number of times.
    reads_together: bool = False
    # The caches that download rows from URLs.
    caches: Sequence[RowCache] = ()
    # The ranks with the same tokens, if each of them reads only a part of every batch.
    readers: Group = Group()

    def __init__(self, n_hooks: int) -> None:
        self.n_hooks = n_hooks

    @abstractmethod
    def of_hook(self, hook: int) -> HookRows:
        """Return the sample and held-out rows for the hook at a given index."""

    @abstractmethod
    def rewind(self) -> None:
        """Go back to the position after the last batch passed to `note_trained`; discard batches read after it."""

    @abstractmethod
    def read(self, position: int, n: int, empty: Empty = empty_rows) -> ReadRows:
        """Return this rank's next n rows; `position` is the total number of tokens, over all ranks, before these rows.

        The rows are read into memory from `empty` if possible. With several `readers`, return only this rank's part of
        the rows, for an `Exchange`.
        """

    def decoded(self, pair: Pair) -> Pair:
        """Decode a batch's rows from `read`, on their device."""
        return pair

    @abstractmethod
    def note_trained(self, rows: ReadRows) -> None:
        """Record that training on a batch has started."""

    @abstractmethod
    def bad_row(self, since: int, now: int, tokens_per_step: int) -> str | None:
        """Return a sentence about a non-finite row used for training between two positions, or None.

        This is a collective call for all ranks that train the same SAEs.
        """

    def stream_places(self) -> list[BufferPlace] | msgspec.UnsetType:
        """Return the stream position of every part, for a checkpoint; this is a collective call for all ranks."""
        return msgspec.UNSET

    def held_out_key(self) -> str:
        """Return a short string identifying the held-out rows, or "" for a stream."""
        return ""


def open_data(
    source: Source, job: JobConfig, parallel: Parallel, resumed: CheckpointState | None = None
) -> TrainingData:
    """Return one rank's training data; `resumed` is the checkpoint state that the run resumes from.

    Raise `UserError` if a stream cannot continue from this state, or if rows cannot be held out as the job requests.
    """
    n_held_out, seed = job.data.held_out(_n_split(source), parallel.world_size), job.train.seed
    is_asked = job.data.hold_out != "auto"
    if isinstance(source, StreamSource):
        how = HowHeldOut(job.hold_out, job.data.split_seed, is_asked)
        return StreamData(source, n_held_out, seed, parallel, resumed.stream if resumed else None, how)
    assert isinstance(source, IndexedSource)
    # `usual_hold_out` depends only on the shards present when the run started, because added shards may not record
    # texts.
    how = HowHeldOut(job.hold_out if is_asked else source.usual_hold_out, job.data.split_seed, is_asked)
    if parallel.device.type != "cpu":
        source.read_by_all_threads()
    readers = parallel.latents if parallel.reads_parts else Group()
    data = IndexedData(source, n_held_out, seed, parallel.data, how, readers)
    if resumed and resumed.held_out and _choice(resumed.held_out) != _choice(data.held_out_key()):
        raise UserError(_HELD_OUT_OTHERS)
    return data


def _choice(key: str) -> str:
    """Return the part of a `held_out_key` that depends only on the rows present when the run started."""
    return key.partition("-")[0]


class HowHeldOut(NamedTuple):
    """How rows are held out: the policy, its seed, and whether the job sets `hold_out`, which disables the fallback."""

    hold_out: HoldOut
    seed: int
    is_asked: bool = False


class IndexedData(TrainingData):
    """Stored rows in an endless sequence of epochs; a checkpoint stores only a position."""

    def __init__(
        self,
        source: IndexedSource,
        n_held_out: int,
        seed: int,
        group: Group,
        how: HowHeldOut | None = None,
        readers: Group | None = None,
    ) -> None:
        super().__init__(source.n_hooks)
        self._source, self.readers = source, readers or Group()
        try:
            self.split = _split(source, n_held_out, how or HowHeldOut("rows", seed))
        except TooFewTexts as error:
            raise UserError(f'data.hold_out: whole texts cannot be held out, since {error}; use "blocks"') from None
        if isinstance(self.split, MixedSplit):
            self._order: Order | MixedOrder = MixedOrder(self.split, seed, source.run)
        elif source.shuffle_shards:
            self.split.samples_first = True
            self._order = WindowOrder(self.split, seed, source.run, source.shard_starts, source.shuffle_shards)
        else:
            self._order = Order(self.split, seed, source.run)
        self.caches, self._spans = source.caches, list[Span]()
        self._keep(0, 1)
        self.n_held_out, self.n_texts = len(self.split.held_out), self.split.n_texts
        self.n_train, self.hold_out = self.split.n_train, self.split.hold_out
        self._of_hooks = [_IndexedRows(source.of_hook(hook), self.split, group) for hook in range(source.n_hooks)]

    def of_hook(self, hook: int) -> HookRows:
        return self._of_hooks[hook]

    def held_out_key(self) -> str:
        """Return a hash of the held-out row numbers, followed by the row count."""
        splits = self.split.splits if isinstance(self.split, MixedSplit) else [self.split]
        digest = hashlib.sha256(b"".join(split.held_out.tobytes() for split in splits))
        return f"{digest.hexdigest()[:16]}-{self.n_held_out}"

    def rewind(self) -> None:
        """Do nothing, because any position can be read."""

    def read(self, position: int, n: int, empty: Empty = empty_rows) -> ReadRows:
        self._keep(position, n)
        return ReadRows(*self._source.coded_pairs(own_rows(self._order.token_slice(position, n), self.readers), empty))

    def decoded(self, pair: Pair) -> Pair:
        return self._source.decoded(pair)

    def _keep(self, position: int, n: int) -> None:
        """Keep the rows of a batch and of the window after it, if they are stored at a URL."""
        if not self.caches:
            return
        every = [(0, self._source.n_tokens)]
        spans = self._order.spans(position, n) if isinstance(self._order, WindowOrder) else every
        if spans != self._spans:
            self._source.keep(spans)
            self._spans = spans

    def note_trained(self, rows: ReadRows) -> None:
        """Do nothing, because rows can be reread."""

    def bad_row(self, since: int, now: int, tokens_per_step: int) -> str | None:
        steps = (self._order.token_slice(start, tokens_per_step) for start in range(since, now, tokens_per_step))
        rows = (self._source.first_not_finite(indices) for indices in steps)
        return next((_bad_row(self._source, row) for row in rows if row is not None), None)


class _IndexedRows(HookRows):
    """One hook's stored rows."""

    def __init__(self, source: IndexedSource, split: Split | MixedSplit, group: Group) -> None:
        self._source, self._split = source, split
        self.n_held_out, self.hold_out, self.stored_as = len(split.held_out), split.hold_out, source.stored_as
        of_rank = slice(group.index, None, group.size)
        # Read the labels now, because a shard may be truncated later. All ranks get the same labels and halves.
        clusters = _clusters(source, split.held_out, source.split_sizes)
        self._own = split.held_out[of_rank]
        self._own_clusters = clusters._replace(labels=clusters.labels[of_rank])
        self._own_halves = halves_of(clusters.labels)[of_rank]

    def sample(self, seed: int) -> Pair:
        return self._source.pairs(self._split.sample(SAMPLE_TOKENS, seed))

    def training_rows(self, n: int, seed: int, batch_size: int) -> Iterator[Pair]:
        indices = np.sort(self._split.sample(n, seed))
        for start in range(0, len(indices), batch_size):
            yield self._source.pairs(indices[start : start + batch_size])

    def bad_in_sample(self, index: int, seed: int) -> str:
        return _bad_row(self._source, int(np.sort(self._split.sample(SAMPLE_TOKENS, seed))[index]))

    def held_out(self, batch_size: int, half: int | None = None) -> Iterator[Pair]:
        own = self._own if half is None else self._own[self.of_half(half)]
        for start in range(0, len(own), batch_size):
            yield self._source.pairs(own[start : start + batch_size])

    def of_half(self, half: int) -> Indices:
        return np.flatnonzero(self._own_halves == half)

    def clusters(self) -> Clusters:
        return self._own_clusters

    def clusters_of_sample(self, seed: int) -> Clusters:
        return _clusters(self._source, np.sort(self._split.sample(SAMPLE_TOKENS, seed)))


def _bad_row(source: IndexedSource, row: int) -> str:
    return f"{source.place} contains NaN or infinite values in {source.name_of(row)}"


def _split(source: IndexedSource, n_held_out: int, how: HowHeldOut) -> Split | MixedSplit:
    """Choose the held-out rows; if the data has grown since the run started, choose only from the original rows."""
    first_sizes = source.split_sizes
    if len(source.sizes) < 2:
        texts, n_first = source.texts[0] if source.texts else None, first_sizes[0] if first_sizes else None
        rows = source.n_tokens, n_held_out, how.seed
        return split_of(*rows, hold_out=how.hold_out, texts=texts, n_first=n_first, is_asked=how.is_asked)
    return MixedSplit(
        source.sizes,
        source.weights,
        n_held_out,
        how.seed,
        hold_out=how.hold_out,
        texts=source.texts,
        first_sizes=first_sizes,
        is_asked=how.is_asked,
    )


def _clusters(source: IndexedSource, rows: Indices, first_sizes: Sequence[int] = ()) -> Clusters:
    """Label ascending rows by text or, if texts are unknown, by blocks of `BLOCK` neighbours.

    If `first_sizes` is given, all the rows must be among the first `first_sizes` rows of their sets, and later rows do
    not affect the labels.
    """
    if not source.texts:
        return Clusters(rows // BLOCK, "blocks")
    sizes = source.sizes or [source.n_tokens]
    labels, n = [np.zeros(0, np.int64)], 0
    places = itertools.pairwise([0, *itertools.accumulate(sizes)])
    for texts, (first, last), n_rows in zip(source.texts, places, first_sizes or sizes, strict=True):
        own = rows[(rows >= first) & (rows < last)]
        if len(own):
            labels.append(texts.labels(own - first, n_rows) + n)
            n = int(labels[-1].max()) + 1
    return Clusters(np.concatenate(labels), "texts")


def _n_split(source: Source) -> int | None:
    """Return the number of candidates for held-out rows, or None for a stream of unknown length."""
    return sum(source.split_sizes) or source.n_tokens if isinstance(source, IndexedSource) else source.n_tokens


class StreamData(TrainingData):
    """A stream's rows, shuffled by a `ShuffleBuffer`; each row is used once for training.

    Ranks with different tokens read different parts of the stream. A checkpoint stores each part's position, so a run
    can only be resumed with the same number of parts. If the ranks' shares of the tokens change, the rows in each step
    change too, but no row is used twice.

    If the stream's texts are known, complete texts near its start are held out, chosen by a hash of their numbers. If
    texts are unknown, or if there are only a few long texts, each part's first rows are held out instead. The held-out
    rows and the sample, which consists of the first training rows, stay in memory. A resumed run rereads these rows.
    """

    def __init__(
        self,
        source: StreamSource,
        n_held_out: int,
        seed: int,
        parallel: Parallel,
        places: list[BufferPlace] | msgspec.UnsetType | None,
        how: HowHeldOut | None = None,
    ) -> None:
        super().__init__(source.n_hooks)
        self._source, self._group, self._device = source, parallel.data, parallel.device
        self.n_held_out = n_held_out
        source.begin(self._group.index, self._group.size, parallel.device)
        if source.is_divided and (peers := parallel.neighbours_with_these_tokens()).size > 1:
            source.divide(peers)
            self.reads_together = True
        rows = StreamRows(source)
        held_out = self._hold_out(rows, how or HowHeldOut("rows", seed))
        self._held_out = of_each_hook(rows.joined(held_out), source.n_hooks)
        self._clusters = _clusters_of_chunks(held_out)
        self._halves, n_texts = self._halves_and_texts()
        if self.hold_out == "texts":
            self.n_texts = n_texts
        first = BufferPlace(0, 0, rows.place)
        taken = rows.take_chunks(-(-SAMPLE_TOKENS // self._group.size))
        self._sample = of_each_hook(self._whole_sample(rows.joined(taken)), source.n_hooks)
        self._place = first if places is None else _place_of(self._group, places)
        self._buffer = ShuffleBuffer(rows, source.shuffle_tokens, seed, self._group.index)
        self._is_filled = False
        self._bad: list[Mark] = []

    def of_hook(self, hook: int) -> HookRows:
        rows = self._held_out[hook], self._sample[hook]
        return _StreamHook(self, *rows, self._bad_in_sample, self._clusters, self._halves)

    def rewind(self) -> None:
        self._is_filled = False

    def read(self, position: int, n: int, empty: Empty = empty_rows) -> ReadRows:
        if not self._is_filled:
            self._buffer.fill(self._place)
            self._is_filled = True
        x, y, numbers = self._buffer.take(n, empty)
        if len(x) < n:
            raise self._ended()
        finite = torch.stack([are_finite(*pair) for pair in of_each_hook((x, y), self.n_hooks)]).all(dim=0)
        bad = numbers[~finite.numpy()]
        return ReadRows(x, y, Mark(position, self._buffer.place, int(bad.min()) if len(bad) else None))

    def note_trained(self, rows: ReadRows) -> None:
        assert rows.mark is not None
        self._place = rows.mark.place
        # Record only the first bad row: only that row is reported, and every batch may have bad rows.
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

    def _hold_out(self, rows: StreamRows, how: HowHeldOut) -> list[Chunk]:
        """Return this rank's held-out rows; afterwards, the next row of `rows` is the first training row."""
        n_own = len(range(self._group.index, self.n_held_out, self._group.size))
        if how.hold_out == "texts" and self.n_held_out:
            if self._source.knows_texts and (chunks := self._of_whole_texts(rows, n_own, how.seed)):
                self.hold_out = "texts"
                return chunks
            if how.is_asked:
                known = "are too few or too long" if self._source.knows_texts else "are unknown"
                raise UserError(f'data.hold_out: the texts of {self._source.place} {known}; use "rows"')
            rows.begin_again()
        return rows.take_chunks(n_own)

    def _of_whole_texts(self, rows: StreamRows, n_own: int, seed: int) -> list[Chunk]:
        """Hold out texts near the start of the stream, chosen by a hash; return [] if they have too few rows.

        All ranks choose the same texts, and each rank holds out the rows of these texts in its part. Training leaves
        out chosen texts with numbers up to twice the highest number read, because a run with fewer parts has to read
        slightly further to find enough rows.
        """
        key, held, n_held, n_read, last = seed_key(seed), list[Chunk](), 0, 0, -1
        while n_held < n_own and n_read < MOST_READ * n_own and (chunk := rows.next_chunk()):
            assert chunk.documents is not None
            n_read, last = n_read + len(chunk.x), max(last, int(chunk.documents.max()))
            if (chosen := _is_chosen(chunk.documents, key)).any():
                held.append(chunk.where(chosen))
                n_held += len(held[-1].x)
        of_ranks = self._group.gather(torch.tensor([n_held, n_held < n_own, last], device=self._device))
        fewest, some_lack, last = int(of_ranks[:, 0].min()), bool(of_ranks[:, 1].any()), int(of_ranks[:, 2].max())
        if some_lack:
            if fewest * self._group.size < LEAST_OF_TEXTS * self.n_held_out:
                return []
            n_own, self.n_held_out = fewest, fewest * self._group.size
        rows.begin_again(lambda documents: (documents <= 2 * last + 1) & _is_chosen(documents, key))
        return _first(held, n_own)

    def _halves_and_texts(self) -> tuple[Indices, int]:
        """Return the half that each of this rank's held-out rows is in, and the total number of held-out texts.

        A text can have contexts in several parts. All ranks compute the halves from the labels of all ranks, so that
        each text is in the same half everywhere.
        """
        own = torch.from_numpy(self._clusters.labels)
        if not self._source.knows_texts or not self.n_held_out:
            return halves_of(self._clusters.labels), 0
        n_most = len(range(0, self.n_held_out, self._group.size))
        # Text numbers are never negative, so -1 can mark padding.
        padded = torch.nn.functional.pad(own, (0, n_most - len(own)), value=-1).to(self._device)
        of_ranks = self._group.gather(padded).cpu().numpy()
        labels = of_ranks[of_ranks >= 0]
        first = int((of_ranks[: self._group.index] >= 0).sum())
        return halves_of(labels)[first : first + len(own)], len(np.unique(labels))

    def _whole_sample(self, own: Pair) -> Pair:
        """Gather the sample, with the same number of rows from each part; the result is the same on all ranks."""
        n = int(self._group.gather(torch.tensor(len(own[0]), device=self._device)).min())
        if not n:
            raise self._ended()
        x, y = (self._of_all_parts(part[:n]) for part in own)
        return x, x if own[1] is own[0] else y

    def _of_all_parts(self, rows: Tensor) -> Tensor:
        # Send bytes, because not every communication library supports every dtype.
        as_bytes = rows.contiguous().view(torch.uint8).to(self._device)
        return self._group.gather(as_bytes).cpu().flatten(0, 1).view(rows.dtype)

    def _bad_in_sample(self, index: int) -> str:
        n_each = len(self._sample[0][0]) // self._group.size
        return self._bad_sentence(index % n_each, index // n_each)

    def _bad_sentence(self, row: int, part: int) -> str:
        """Return an error message for a non-finite row; `row` is counted from the first training row."""
        where = f"row {row + len(range(part, self.n_held_out, self._group.size))}"
        if self.hold_out == "texts":
            where = f"row {row} (not counting held-out texts)"
        return f"{self._source.place} contains NaN or infinite values in {where}{self._of_part(part)}"

    def _ended(self) -> UserError:
        where = f"{self._source.place} ran out of rows{self._of_part(self._group.index)}"
        return UserError(f"train.n_tokens: {where} before the end of the run; start a new run with fewer tokens")

    def _of_part(self, part: int) -> str:
        return f" (part {part + 1} of {self._group.size})" if self._group.size > 1 else ""


class _StreamHook(HookRows):
    """The sample and held-out rows for one hook of a stream, in memory."""

    def __init__(
        self,
        data: StreamData,
        held_out: Pair,
        sample: Pair,
        bad: Callable[[int], str],
        clusters: Clusters,
        halves: Indices,
    ) -> None:
        self.n_held_out, self.hold_out = data.n_held_out, data.hold_out
        self._held_out, self._sample, self._bad = held_out, sample, bad
        self._clusters, self._halves = clusters, halves

    def sample(self, seed: int) -> Pair:
        return self._sample

    def training_rows(self, n: int, seed: int, batch_size: int) -> Iterator[Pair]:
        x, y = (rows[:n] for rows in self._sample)
        return in_batches(x, x if self._sample[0] is self._sample[1] else y, batch_size)

    def bad_in_sample(self, index: int, seed: int) -> str:
        return self._bad(index)

    def clusters(self) -> Clusters:
        return self._clusters

    def clusters_of_sample(self, seed: int) -> Clusters:
        return Clusters(np.arange(len(self._sample[0])) // BLOCK, "blocks")

    def of_half(self, half: int) -> Indices:
        return np.flatnonzero(self._halves == half)

    def held_out(self, batch_size: int, half: int | None = None) -> Iterator[Pair]:
        x, y = self._held_out
        if half is not None:
            own = torch.from_numpy(self.of_half(half))
            inputs = x[own]
            x, y = inputs, inputs if y is x else y[own]
        return in_batches(x, y, batch_size)


def in_batches(x: Tensor, y: Tensor, batch_size: int) -> Iterator[Pair]:
    """Yield inputs and targets in batches; if both are the same tensor, so are the batches."""
    for start in range(0, len(x), batch_size):
        inputs = x[start : start + batch_size]
        yield inputs, inputs if y is x else y[start : start + batch_size]


def _is_chosen(documents: Tensor, key: Words) -> Tensor:
    """Return a mask [n] of the rows in held-out texts, given each row's text number, int64 [n]."""
    # Rows from one text are adjacent, so hash each text once instead of hashing every row.
    numbers, inverse = documents.unique_consecutive(return_inverse=True)
    return torch.from_numpy(keys_of(numbers.numpy(), key) < np.uint64(2**64 * SHARE_OF_TEXTS))[inverse]


def _first(chunks: list[Chunk], n: int) -> list[Chunk]:
    """Return the first n rows of the chunks."""
    kept: list[Chunk] = []
    for chunk in chunks:
        if n > 0:
            kept.append(chunk.where(torch.arange(len(chunk.x)) < n))
            n -= len(chunk.x)
    return kept


def _clusters_of_chunks(chunks: Sequence[Chunk]) -> Clusters:
    """Label the rows of chunks by text or, if texts are unknown, by blocks of `BLOCK` neighbours."""
    documents = [chunk.documents for chunk in chunks if chunk.documents is not None]
    if not documents:
        return Clusters(np.arange(sum(len(chunk.x) for chunk in chunks)) // BLOCK, "blocks")
    return Clusters(torch.cat(documents).numpy(), "texts")


def _place_of(group: Group, places: list[BufferPlace] | msgspec.UnsetType) -> BufferPlace:
    """Return this rank's position; raise `UserError` unless the checkpoint has one position per rank in `group`."""
    if isinstance(places, msgspec.UnsetType):
        raise UserError("data.source: the checkpoint is from a run on stored data, not on a stream; start a new run")
    if len(places) != group.size:
        raise UserError(
            f"launch.gpus: the stream was read in {len(places)} parts, one for each rank that reads tokens, and "
            f"{group.size} cannot continue with them; resume on the same number of ranks as before"
        )
    return places[group.index]
