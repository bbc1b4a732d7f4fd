"""Stored activations from several hooks, concatenated row by row."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.activations.base import Empty, IndexedSource, Indices, Pair, empty_rows
from trainer.activations.texts import Texts
from trainer.contract.runs.data_record import DataRecord
from trainer.contract.wording import join_words

_ROWS_COMPARED = 4096


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
        self._agree_on_texts()

    def of_hook(self, hook: int) -> IndexedSource:
        return self._sources[hook]

    def continue_from(self, before: DataRecord) -> None:
        n_each = len(before) // len(self._sources)
        for number, one in enumerate(self._sources):
            one.continue_from(before[number * n_each : (number + 1) * n_each])
        self.split_sizes = self._sources[0].split_sizes
        self._agree_on_texts()

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

    def name_of(self, index: int) -> str:
        return f"{self._sources[0].name_of(index)}, or in the same row of another hook"


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
