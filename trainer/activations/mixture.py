"""Assigns rows from several sources to batches, mixed according to weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.activations.base import Indices
from trainer.activations.permutation import permutation
from trainer.activations.split import split_of
from trainer.activations.texts import Texts
from trainer.contract.settings.sources import HoldOut
from trainer.contract.wording import join_words

# A seed is a list of numbers. A seed's last element differs between passes and splits, so that their random numbers are
# independent of each other and of the order of the epochs.
_OF_PASS, _OF_SPLIT = 1, 2


class MixedSplit:
    """Holds out rows from each source in proportion to its weight, or to its row count if there are no weights.

    Rows are numbered consecutively over all sources, and each source keeps at least one training row. Held-out rows are
    chosen from the first `first_sizes` rows of each source, as in `Split`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] | None,
        n_held_out: int,
        seed: int,
        *,
        hold_out: HoldOut = "rows",
        texts: Sequence[Texts] = (),
        first_sizes: Sequence[int] | None = None,
        is_asked: bool = False,
    ) -> None:
        first = first_sizes or sizes
        parts = apportion(n_held_out, weights or first, [size - 1 for size in first])
        known: Sequence[Texts | None] = texts or [None] * len(sizes)
        every = zip(sizes, parts, known, first, strict=True)
        how: Any = {"hold_out": hold_out, "is_asked": is_asked}
        self.splits = [
            split_of(size, part, seed, number, _OF_SPLIT, texts=of_source, n_first=n, **how)
            for number, (size, part, of_source, n) in enumerate(every)
        ]
        used = [split for split in self.splits if len(split.held_out)]
        self.hold_out = join_words(list(dict.fromkeys(split.hold_out for split in used)) or [hold_out])
        self.n_texts = sum(split.n_texts for split in used)
        self._begins: Indices = np.cumsum([0, *sizes[:-1]])
        self._sizes = [split.n_train for split in self.splits]
        self.n_train = sum(self._sizes)
        # The number of rows that an epoch draws from each source.
        self.draws = self._sizes if weights is None else apportion(self.n_train, weights)
        self.held_out: Indices = np.concatenate([self._through(n, one.held_out) for n, one in enumerate(self.splits)])

    def rows(self, source: int, numbers: Indices) -> Indices:
        """Convert zero-based training row numbers within a source to row numbers over all sources."""
        return self._through(source, self.splits[source].rows(numbers))

    def sample(self, n: int, seed: int) -> Indices:
        """Sample at most n training rows, drawn from each source in proportion to its weight."""
        parts = apportion(min(n, self.n_train), self.draws, self._sizes)
        drawn = (self.splits[source].sample(part, seed, source) for source, part in enumerate(parts))
        return np.concatenate([self._through(source, rows) for source, rows in enumerate(drawn)])

    def _through(self, source: int, rows: Indices) -> Indices:
        through: Indices = rows + self._begins[source]
        return through


class MixedOrder:
    """An endless sequence of epochs in a seeded order; an epoch's length is the total number of training rows.

    Each source's share of an epoch is its relative weight, rounded to whole rows. A row is repeated only after all
    other rows of its source have been used equally often. To ensure this, a pass over a source can span several epochs,
    and each pass uses a different order. Without weights, an epoch contains every row once. As in `Order`, a checkpoint
    stores only a position, and `run` neighbouring rows mostly stay together.
    """

    def __init__(self, split: MixedSplit, seed: int, run: int = 1) -> None:
        self._split, self._seed, self._run = split, seed, run
        self._draws = np.array(split.draws)
        self._ends = np.cumsum(self._draws)

    def token_slice(self, start: int, length: int) -> Indices:
        """Return the row numbers at positions start .. start + length - 1."""
        n, end = self._split.n_train, start + length
        numbers = [
            self._of_epoch(epoch, np.arange(max(start - epoch * n, 0), min(end - epoch * n, n)))
            for epoch in range(start // n, -(-end // n))
        ]
        return np.concatenate(numbers)

    def _of_epoch(self, epoch: int, positions: Indices) -> Indices:
        slots = permutation(self._split.n_train, self._run, self._seed, epoch)(positions)
        sources = np.searchsorted(self._ends, slots, side="right")
        # For each slot, the number of earlier slots with the same source.
        before = slots - (self._ends - self._draws)[sources] + epoch * self._draws[sources]
        rows = np.empty_like(slots)
        for source in np.unique(sources):
            rows[sources == source] = self._of_source(int(source), before[sources == source])
        return rows

    def _of_source(self, source: int, before: Indices) -> Indices:
        n = self._split.splits[source].n_train
        passes, places = np.divmod(before, n)
        numbers = np.empty_like(before)
        for one in np.unique(passes):
            order = permutation(n, self._run, self._seed, int(one), source, _OF_PASS)
            numbers[passes == one] = order(places[passes == one])
        return self._split.rows(source, numbers)


def apportion(n: int, weights: Sequence[float], most: Sequence[int] | None = None) -> list[int]:
    """Split n into integers in proportion to weights (largest-remainder method); `most` contains the upper limits.

    Any excess over a limit is distributed among the other integers.
    """
    given, left = [0] * len(weights), n
    open_to = [*range(len(weights))]
    while open_to:
        shares = dict(zip(open_to, _by_largest_remainder(left, [weights[one] for one in open_to]), strict=True))
        full = [one for one in open_to if most is not None and shares[one] > most[one]]
        for one in full or open_to:
            given[one] = shares[one] if most is None or not full else most[one]
            left -= given[one]
        open_to = [one for one in open_to if one not in full] if full else []
    return given


def _by_largest_remainder(n: int, weights: Sequence[float]) -> list[int]:
    # If all remaining weights are 0, use equal weights.
    weights = weights if sum(weights) else [1] * len(weights)
    exact = [n * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda one: shares[one] - exact[one])
    for one in by_remainder[: n - sum(shares)]:
        shares[one] += 1
    return shares
