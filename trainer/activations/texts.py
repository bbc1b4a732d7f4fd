"""Maps stored rows to their texts, using each shard's tensor `document`, without reading activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.activations.permutation import Indices, Words, mixed

Numbers = NDArray[Any]
# The maximum number of entries per row in the counting table. If the table would be larger, text numbers are counted by
# sorting instead.
_PLACES_PER_ROW = 4


class Counts(NamedTuple):
    """Arrays [n] describing n texts: each text's numbering, its number in that numbering, and its row count."""

    numbering: Indices
    number: Indices
    n_rows: Indices


class Texts:
    """The texts of the rows in one set of shards; `parts` contains the text numbers of each shard's rows, in order.

    With `numbered_through`, as in sae-tui's own extractions, a number refers to the same text in all shards. Otherwise,
    if numbers ascend within all shards and a later shard starts again at the lowest number, that shard starts a new
    numbering, and its texts are new. If the numbering is unclear, rows with equal numbers are treated as one text, so
    that no text is on both sides of a split.
    """

    def __init__(self, parts: Sequence[Numbers], *, numbered_through: bool = True) -> None:
        self._parts = [part for part in parts if len(part)]
        self._starts = np.cumsum([0, *map(len, self._parts)])
        self.n_rows = int(self._starts[-1])
        self._numbered_through = numbered_through

    def counts(self, n_rows: int) -> Counts:
        """Return the texts in the first `n_rows` rows, with a row count for each; later rows have no effect."""
        found: dict[int, list[tuple[Indices, Indices]]] = {}
        for part, start, numbering in zip(self._parts, self._starts, self._numberings(n_rows), strict=False):
            if start < n_rows:
                found.setdefault(int(numbering), []).append(_counted(part[: n_rows - start]))
        merged = {numbering: _merged(parts) for numbering, parts in found.items()}
        numberings = [np.full(len(number), numbering) for numbering, (number, _) in merged.items()]
        numbers, counts = zip(*merged.values(), strict=True)
        return Counts(np.concatenate(numberings), np.concatenate(numbers), np.concatenate(counts))

    def rows_of(self, texts: Counts, n_rows: int) -> Indices:
        """Return all rows of `texts`, a subset of `counts(n_rows)`, in ascending order.

        In shards that start after the first `n_rows` rows, rows are matched by text number, regardless of the
        numbering.
        """
        rows, numberings = [], self._numberings(n_rows)
        for place, (part, start) in enumerate(zip(self._parts, self._starts, strict=False)):
            is_later = place >= len(numberings)
            wanted = texts.number if is_later else texts.number[texts.numbering == numberings[place]]
            rows.append(np.flatnonzero(np.isin(part, wanted)) + start)
        return np.concatenate(rows)

    def labels(self, rows: Indices, n_rows: int | None = None) -> Indices:
        """Return a label, counted from 0, for each of the given ascending rows; rows of one text share a label.

        If `n_rows` is given, all of `rows` must be among the first `n_rows`, and later rows do not affect the labels.
        """
        places = np.searchsorted(self._starts, rows, side="right") - 1
        numbers = np.empty(len(rows), np.int64)
        for place in np.unique(places):
            own = places == place
            numbers[own] = self._parts[place][rows[own] - self._starts[place]]
        known, of_known = np.unique(numbers, return_inverse=True)
        numberings = self._numberings(self.n_rows if n_rows is None else n_rows)[places]
        labels: Indices
        _, labels = np.unique(numberings * len(known) + of_known, return_inverse=True)
        return labels

    def _numberings(self, n_rows: int) -> Indices:
        """Return the index of the numbering of each shard that contains any of the first `n_rows` rows."""
        parts = [part for part, start in zip(self._parts, self._starts, strict=False) if start < n_rows]
        return np.zeros(len(parts), np.int64) if self._numbered_through else _numberings(parts)


def keys_of(number: Indices, seed: Words, numbering: Indices | int = 0) -> Words:
    """Return a random number for each text, independent of the other texts; `seed` comes from `seed_key`."""
    of_number = mixed(number.astype(np.int64).view(np.uint64) ^ seed)
    return mixed(of_number + np.asarray(numbering).astype(np.uint64))


def seed_key(*seed: int) -> Words:
    """Return the seed for `keys_of`."""
    return np.random.SeedSequence(seed).generate_state(1, np.uint64).astype(np.uint64)


def _numberings(parts: Sequence[Numbers]) -> Indices:
    """Return the index of each shard's numbering; if the numberings are unclear, all shards share one numbering."""
    if not parts:
        return np.zeros(0, np.int64)
    lowest, highest = (np.array([int(limit(part)) for part in parts]) for limit in (np.min, np.max))
    # Use a strict comparison, because a text continuing in the next shard does not start a new numbering.
    falls = lowest[1:] < highest[:-1]
    is_sure = bool((lowest[1:][falls] == lowest[0]).all())
    # If numbers do not ascend, the rows may be shuffled across shards, so each shard has rows from every text.
    if not is_sure or (falls.any() and not all(_is_ascending(part) for part in parts)):
        return np.zeros(len(parts), np.int64)
    return np.concatenate([[0], falls.cumsum()])


def _is_ascending(part: Numbers) -> bool:
    return bool((part[1:] >= part[:-1]).all())


def _counted(part: Numbers) -> tuple[Indices, Indices]:
    """Return the text numbers in a shard, in ascending order, with their counts."""
    low, high = int(part.min()), int(part.max())
    if high - low < _PLACES_PER_ROW * len(part) + 2**16:
        counts = np.bincount(part.astype(np.int64) - low)
        present = np.flatnonzero(counts)
        return present + low, counts[present]
    numbers, counts = np.unique(part, return_counts=True)
    return numbers.astype(np.int64), counts


def _merged(parts: Sequence[tuple[Indices, Indices]]) -> tuple[Indices, Indices]:
    numbers, inverse = np.unique(np.concatenate([number for number, _ in parts]), return_inverse=True)
    totals = np.zeros(len(numbers), np.int64)
    np.add.at(totals, inverse, np.concatenate([count for _, count in parts]))
    return numbers, totals
