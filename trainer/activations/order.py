"""Determines the order in which training uses stored rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from trainer.activations.base import Indices, Span
from trainer.activations.permutation import permutation
from trainer.activations.split import Split

# Separates the permutations of shards and of windows from those of whole epochs.
_OF_SHARDS = 2**33


class Order:
    """An endless sequence of epochs, each a seeded permutation of all training rows.

    A batch is a contiguous slice of this sequence. Therefore, a batch can span the end of one epoch and the start of
    the next, no token is lost, and a checkpoint only has to store a position. Runs of `run` neighbouring rows stay
    together.
    """

    def __init__(self, split: Split, seed: int, run: int = 1) -> None:
        self._split, self._seed, self._run = split, seed, run

    def token_slice(self, start: int, length: int) -> Indices:
        """Return the row numbers at positions start .. start + length - 1."""
        n, end = self._split.n_train, start + length
        numbers = [
            self._epoch(epoch)(np.arange(max(start - epoch * n, 0), min(end - epoch * n, n)))
            for epoch in range(start // n, -(-end // n))
        ]
        return self._split.rows(np.concatenate(numbers))

    def _epoch(self, epoch: int) -> Callable[[Indices], Indices]:
        return permutation(self._split.n_train, self._run, self._seed, epoch)


class WindowOrder(Order):
    """An order in which each window of shards is used completely before the next one.

    An epoch is a seeded permutation of the shards, cut into windows of `n_shards` shards. The rows of a window are
    permuted together, so rows of different windows are never in the same part of an epoch.
    """

    def __init__(self, split: Split, seed: int, run: int, starts: Sequence[int], n_shards: int) -> None:
        super().__init__(split, seed, run)
        self._starts, self._n_shards = np.array([*starts, split.n_tokens]), n_shards
        # The training rows of shard i have the numbers _begins[i] .. _begins[i + 1] - 1.
        self._begins = self._starts - np.searchsorted(split.left_out, self._starts)
        self._windows = functools.lru_cache(4)(self._cut)

    def token_slice(self, start: int, length: int) -> Indices:
        return np.concatenate([self._split.rows(self._numbers(*part)) for part in self._parts(start, start + length)])

    def spans(self, start: int, length: int) -> list[Span]:
        """Return the rows of a batch's window and of the window after it, in the order of their use.

        For a batch from several windows, return only these windows, because the cache has room for two.
        """
        parts = [(epoch, window) for epoch, window, _ in self._parts(start, start + length)]
        epoch, window = parts[-1]
        if len(parts) == 1:
            parts.append((epoch + 1, 0) if window + 1 == len(self._windows(epoch)) else (epoch, window + 1))
        shards = [int(shard) for epoch, window in parts for shard in self._windows(epoch)[window]]
        # The held-out rows and samples come from the first shards.
        spans = [(0, self._split.n_first)] if self._split.n_first < self._split.n_tokens else []
        return [*spans, *((int(self._starts[shard]), int(self._starts[shard + 1])) for shard in shards)]

    def _cut(self, epoch: int) -> list[Indices]:
        """Return the shards of each window of an epoch; shards whose rows are all held out are left out."""
        shards = permutation(len(self._starts) - 1, 1, self._seed, epoch, _OF_SHARDS)(np.arange(len(self._starts) - 1))
        has_rows = np.diff(self._begins)[shards] > 0
        shards = shards[has_rows]
        return [shards[first : first + self._n_shards] for first in range(0, len(shards), self._n_shards)]

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int, Indices]]:
        """Yield the parts of a range of positions that lie in one window: its epoch, its number, and the places."""
        n, sizes = self._split.n_train, np.diff(self._begins)
        for epoch in range(start // n, -(-end // n)):
            first, last = max(start - epoch * n, 0), min(end - epoch * n, n)
            ends = np.cumsum([sizes[window].sum() for window in self._windows(epoch)])
            begins = np.concatenate([[0], ends[:-1]])
            for window in np.flatnonzero((begins < last) & (ends > first)).tolist():
                places = np.arange(max(first, begins[window]), min(last, ends[window])) - begins[window]
                yield epoch, window, places

    def _numbers(self, epoch: int, window: int, places: Indices) -> Indices:
        """Return the numbers of the training rows at some places of a window."""
        shards = self._windows(epoch)[window]
        ends = np.cumsum(np.diff(self._begins)[shards])
        images = permutation(int(ends[-1]), self._run, self._seed, epoch, window, _OF_SHARDS)(places)
        at = np.searchsorted(ends, images, side="right")
        numbers: Indices = images - np.concatenate([[0], ends[:-1]])[at] + self._begins[shards[at]]
        return numbers
