"""Stored activations from several hooks, concatenated row by row."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.activations.base import Empty, IndexedSource, Indices, Pair, Span, empty_rows
from trainer.activations.texts import Texts
from trainer.contract.errors import JobFileError, Problem
from trainer.contract.runs.data_record import DataRecord
from trainer.contract.settings.shards import Shard
from trainer.contract.wording import join_words, plural

_ROWS_COMPARED = 4096
# The key, in the metadata of joined rows, for the list of the parts' metadata.
JOINED = "parts"


class SideBySide(IndexedSource):
    """Concatenates the i-th rows of several sources with the same width and number of rows.

    In an extraction, row i belongs to the same token at every hook. If the sources store their rows in different
    orders, a row combines different tokens. This does not affect training, because each hook has its own SAEs.
    """

    def __init__(self, sources: Sequence[IndexedSource]) -> None:
        self._sources, first = sources, sources[0]
        self.n_hooks, self.d_in, self.d_out, self.n_tokens = len(sources), first.d_in, first.d_out, first.n_tokens
        self.sizes, self.weights, self.meta = first.sizes, first.weights, first.meta
        self.notes = [note for one in sources for note in one.notes]
        self.place = join_words([one.place for one in sources])
        self.shard_starts = first.shard_starts
        self.caches = [cache for one in sources for cache in one.caches]
        self._agree_on_texts()

    def of_hook(self, hook: int) -> IndexedSource:
        return self._sources[hook]

    def continue_from(self, before: DataRecord) -> None:
        n_each = len(before) // len(self._sources)
        for number, one in enumerate(self._sources):
            one.continue_from(before[number * n_each : (number + 1) * n_each])
        first = self._sources[0]
        self.split_sizes, self.shuffle_shards, self.shard_starts = (
            first.split_sizes,
            first.shuffle_shards,
            first.shard_starts,
        )
        self.caches = [cache for one in self._sources for cache in one.caches]
        self._agree_on_texts()

    def use_window(self, shuffle_shards: int, split_rows: int) -> None:
        for one in self._sources:
            one.use_window(shuffle_shards, split_rows)
        self.split_sizes, self.shuffle_shards = self._sources[0].split_sizes, shuffle_shards

    def keep(self, spans: Sequence[Span]) -> None:
        for one in self._sources:
            one.keep(spans)

    def _agree_on_texts(self) -> None:
        first = self._sources[0]
        self.texts, self.usual_hold_out = first.texts, first.usual_hold_out
        if not all(are_alike(first.texts, one.texts) for one in self._sources):
            self.texts, self.usual_hold_out = (), "blocks"

    def read_by_all_threads(self) -> None:
        for one in self._sources:
            one.read_by_all_threads()

    def rows(self, indices: Indices) -> Tensor:
        return torch.cat([one.rows(indices) for one in self._sources], dim=1)

    def pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
        pairs = [one.pairs(indices) for one in self._sources]
        x = _beside([inputs for inputs, _ in pairs], empty)
        return x, x if self.d_out is None else _beside([targets for _, targets in pairs], empty)

    @property
    def coded_bytes(self) -> tuple[int, int] | None:
        of_each = [one.coded_bytes for one in self._sources]
        widths = [one for one in of_each if one is not None]
        return (sum(x for x, _ in widths), sum(y for _, y in widths)) if len(widths) == len(of_each) else None

    def coded_pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
        if self.coded_bytes is None:
            return self.pairs(indices, empty)
        pairs = [one.coded_pairs(indices) for one in self._sources]
        x = _beside([inputs for inputs, _ in pairs], empty)
        return x, x if self.d_out is None else _beside([targets for _, targets in pairs], empty)

    def decoded(self, pair: Pair) -> Pair:
        if self.coded_bytes is None:
            return pair
        widths = [one.coded_bytes or (0, 0) for one in self._sources]
        inputs = pair[0].split([x for x, _ in widths], dim=1)
        targets = inputs if self.d_out is None else pair[1].split([y for _, y in widths], dim=1)
        pairs = [one.decoded(own) for one, own in zip(self._sources, zip(inputs, targets, strict=True), strict=True)]
        x = torch.cat([own for own, _ in pairs], dim=1)
        return x, x if self.d_out is None else torch.cat([own for _, own in pairs], dim=1)

    def name_of(self, index: int) -> str:
        return f"{self._sources[0].name_of(index)}, or in the same row of another hook"


class Joined(SideBySide):
    """Joins the i-th rows of several sources into the rows [n, Σ d_in] of a crosscoder or a cross-layer transcoder.

    Raise `JobFileError` if the i-th rows of two sources come from different tokens.
    """

    def __init__(self, sources: Sequence[IndexedSource]) -> None:
        super().__init__(sources)
        self.n_hooks, self.part_widths = 1, tuple(one.d_in for one in sources)
        self.d_in = sum(self.part_widths)
        self.d_out = None if self.d_out is None else sum(one.d_out or 0 for one in sources)
        self.meta = joined_meta([one.meta for one in sources])
        if differ := next((one for one in sources[1:] if not _have_same_tokens(sources[0], one)), None):
            raise _of_different_tokens(differ, sources[0])

    def of_hook(self, hook: int) -> IndexedSource:
        return self

    @property
    def stored_as(self) -> str:
        words = [*dict.fromkeys(filter(None, (one.stored_as for one in self._sources)))]
        return join_words(words) if words else ""

    def of_part(self, number: int) -> IndexedSource:
        return self._sources[number]

    def continue_from(self, before: DataRecord) -> None:
        super().continue_from(before)
        if any(one.split_sizes != self.split_sizes for one in self._sources):
            raise _of_added_rows(self)

    def beside(self, others: Sequence[Joined]) -> SideBySide:
        if other := next((one for one in others if one.n_tokens != self.n_tokens), None):
            counts = (
                f"{other.n_tokens:,} rows are in all of {other.place}, and {self.n_tokens:,} in all of {self.place}"
            )
            raise JobFileError([Problem("data.hook", f"{counts}; train these crosscoders in separate jobs")])
        return SideBySide([self, *others])

    def first_shards(self) -> Sequence[Shard]:
        return self._sources[0].first_shards()

    def of_first_folder(self, first: int, last: int) -> tuple[Indices, Indices]:
        return self._sources[0].of_first_folder(first, last)

    def name_of(self, index: int) -> str:
        return f"{self._sources[0].name_of(index)}, or in the same row of another part"


class _SomeRows(IndexedSource):
    """Some rows of a source, in a different order; `at` contains the rows' numbers in the source."""

    def __init__(self, source: IndexedSource, at: Indices) -> None:
        self._source, self._at = source, at
        self.d_in, self.n_tokens, self.sizes, self.run = source.d_in, len(at), [len(at)], source.run
        self.place, self.meta, self.notes, self.caches = source.place, source.meta, source.notes, source.caches
        order = np.argsort(at)
        labels = [one.labels(at[order]) for one in source.texts]
        self.texts = [Texts([_in_order_of(order, own)]) for own in labels]
        self.usual_hold_out = source.usual_hold_out

    def continue_from(self, before: DataRecord) -> None:
        self._source.continue_from(before)
        self.caches = self._source.caches
        if sum(self._source.split_sizes) != self._source.n_tokens:
            raise _of_added_rows(self)

    def keep(self, spans: Sequence[Span]) -> None:
        self._source.keep([(0, self._source.n_tokens)])

    def read_by_all_threads(self) -> None:
        self._source.read_by_all_threads()

    @property
    def stored_as(self) -> str:
        return self._source.stored_as

    @property
    def coded_bytes(self) -> tuple[int, int] | None:
        return self._source.coded_bytes

    def rows(self, indices: Indices) -> Tensor:
        return self.decoded(self.coded_pairs(indices))[0]

    def coded_pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
        # The source returns its rows in their own order.
        at = self._at[np.sort(indices)]
        x = self._source.coded_pairs(at)[0][torch.from_numpy(_in_order_of(np.argsort(at), np.arange(len(at))))]
        return x, x

    def decoded(self, pair: Pair) -> Pair:
        x, _ = self._source.decoded(pair)
        return x, x

    def token_ids(self, indices: Indices) -> Indices | None:
        at = self._at[indices]
        tokens = self._source.token_ids(np.sort(at))
        return None if tokens is None else _in_order_of(np.argsort(at), tokens)

    def first_shards(self) -> Sequence[Shard]:
        return self._source.first_shards()

    def of_first_folder(self, first: int, last: int) -> tuple[Indices, Indices]:
        # The rows of the first folder keep their order.
        begin, end = np.searchsorted(self._at, [first, last])
        return np.arange(begin, end), self._at[begin:end] - first

    def name_of(self, index: int) -> str:
        return self._source.name_of(int(self._at[index]))


def _in_order_of(order: Indices, values: Indices) -> Indices:
    """Return the values sorted by `order` in their order before sorting."""
    before = np.empty_like(values)
    before[order] = values
    return before


def matched(sources: Sequence[IndexedSource]) -> Sequence[IndexedSource]:
    """Return sources whose i-th rows belong to the same token, leaving out rows that one of the sources lacks.

    Extractions by two models leave out different outliers. Later rows are then at different places in the shuffled
    shards, so rows are matched by their places in the text. Sources that do not store places are returned unchanged.
    Raise `JobFileError` if two sources share less than half of their rows, or if a source mixes several folders.
    """
    of_all = [one.places() for one in sources]
    of_each = [one for one in of_all if one is not None]
    if len(of_each) < len(sources) or all(_are_equal(of_each[0], one) for one in of_each[1:]):
        return sources
    if several := next((one for one in sources if len(one.sizes) > 1), None):
        # Each mixed folder counts its places from 0, so a place does not identify a row.
        message = f"{several.place} are mixed, so they cannot be joined with folders that have other rows"
        raise JobFileError([Problem("data.path", f"{message}; extract the hooks together")])
    first, *others = [np.concatenate(one) for one in of_each]
    at = [np.arange(len(first))]
    for source, places in zip(sources[1:], others, strict=True):
        order = np.argsort(places)
        found = order[np.searchsorted(places, first, sorter=order).clip(max=len(places) - 1)]
        is_there = places[found] == first
        if 2 * int(is_there.sum()) < min(len(first), len(places)):
            raise _of_different_tokens(source, sources[0])
        first, at = first[is_there], [*(one[is_there] for one in at), found[is_there]]
    rows = [_SomeRows(source, numbers) for source, numbers in zip(sources, at, strict=True)]
    n_without = max(one.n_tokens for one in sources) - len(first)
    rows[0].notes = [*rows[0].notes, f"left out {plural(n_without, 'row')} that not all joined folders have"]
    return rows


def _are_equal(some: Sequence[Indices], others: Sequence[Indices]) -> bool:
    return len(some) == len(others) and all(map(np.array_equal, some, others))


def _of_added_rows(one: IndexedSource) -> JobFileError:
    message = f"rows were added to {one.place}, and the joined folders had different rows before"
    return JobFileError([Problem("data.path", f"{message}; start a new run on the current data")])


def _of_different_tokens(one: IndexedSource, other: IndexedSource) -> JobFileError:
    message = (
        f"the rows of {one.place} and {other.place} belong to different tokens, but each needs the same tokens in"
        " the same order, so extract them from the same text with the same settings"
    )
    return JobFileError([Problem("data.path", message)])


def _have_same_tokens(one: IndexedSource, other: IndexedSource) -> bool:
    """Return whether rows with equal indices belong to the same token, as far as the sources record it.

    Only a sample of the rows is compared.
    """
    if one.n_tokens != other.n_tokens or (one.texts and other.texts and not are_alike(one.texts, other.texts)):
        return False
    tokens, others = one.token_ids(indices := _spread(one.n_tokens)), other.token_ids(indices)
    return tokens is None or others is None or np.array_equal(tokens, others)


def joined_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metadata of a crosscoder's rows: the values that all parts share, and the metadata of each part."""
    common = {key: value for key, value in metas[0].items() if all(meta.get(key) == value for meta in metas)}
    named = {"hook": "+", "hook_name": "+", "model_name": "+"}
    joined = {key: sign.join(str(meta.get(key)) for meta in metas) for key, sign in named.items() if key in metas[0]}
    return joined | common | {JOINED: [*metas]}


def are_alike(some: Sequence[Texts], others: Sequence[Texts]) -> bool:
    """Return whether rows with equal indices come from the same texts, according to a sample of the rows."""
    return len(some) == len(others) and all(
        one.n_rows == other.n_rows
        and np.array_equal(one.labels(_spread(one.n_rows)), other.labels(_spread(one.n_rows)))
        for one, other in zip(some, others, strict=True)
    )


def _spread(n_rows: int) -> Indices:
    return np.unique(np.linspace(0, n_rows - 1, _ROWS_COMPARED).astype(np.int64))


def _beside(parts: Sequence[Tensor], empty: Empty) -> Tensor:
    """Concatenate the columns of all parts, which may have different dtypes, in memory allocated by `empty`."""
    dtype = functools.reduce(torch.promote_types, [part.dtype for part in parts])
    whole = empty(len(parts[0]), sum(part.shape[1] for part in parts), dtype)
    return torch.cat(list(parts), dim=1, out=whole)
