"""Splits rows into training rows and held-out rows."""

from __future__ import annotations

import numpy as np

from trainer.activations.base import Indices
from trainer.activations.permutation import Words
from trainer.activations.texts import Counts, Texts, keys_of, seed_key
from trainer.contract.settings.sources import HoldOut

# The number of neighbouring rows to hold out together. If texts are unknown, each such block is treated as one text.
BLOCK = 128
# The minimum number of blocks from which held-out rows are chosen.
LEAST_BLOCKS = 8
# The maximum fraction of all rows that held-out texts may contain; twice the requested number of rows is always
# allowed.
MOST_IN_TEXTS = 0.25
# The minimum fraction of the held-out rows that each half should contain.
LEAST_OF_HALF = 0.25
# The number of contiguous ranges of rows that alternate between the halves if texts are too long to be kept whole.
N_RANGES = 16


class TooFewTexts(ValueError):
    """Raised if complete texts cannot be held out because there are too few texts or the texts are too long."""


class Split:
    """Training rows, numbered consecutively from 0, and held-out rows.

    The split depends only on `hold_out`, the seed, the requested number of rows, and the number or the texts of the
    first `n_first` rows (by default, of all rows). Therefore, `held_out` does not change if rows are added at the end.
    Added rows become training rows, except rows of a held-out text: these are in `left_out` but not in `held_out`.

    With "texts", about the requested number of rows is held out; with "rows" and "blocks", exactly that number. The
    constructor raises `TooFewTexts` if complete texts cannot be held out.
    """

    def __init__(
        self,
        n_tokens: int,
        n_held_out: int,
        *seed: int,
        hold_out: HoldOut = "rows",
        texts: Texts | None = None,
        n_first: int | None = None,
    ) -> None:
        n_first = n_tokens if n_first is None else n_first
        self.hold_out, self.n_tokens, self.n_first = hold_out, n_tokens, n_first
        # Whether samples of training rows also come from the first rows only.
        self.samples_first = False
        # The number of held-out texts, or 0 if texts are unknown.
        self.n_texts = 0
        if hold_out == "texts" and n_held_out:
            assert texts is not None
            chosen = _texts(texts.counts(n_first), n_first, n_held_out, seed_key(*seed))
            self.left_out: Indices = texts.rows_of(chosen, n_first)
            self.n_texts = len(chosen.number)
        else:
            self.left_out = np.sort((_blocks if hold_out == "blocks" else _rows)(n_first, n_held_out, seed))
        self.held_out: Indices = self.left_out[self.left_out < n_first]
        self.n_train = n_tokens - len(self.left_out)
        # left_out[j] has left_out[j] - j training rows before it.
        self._before = self.left_out - np.arange(len(self.left_out))

    def rows(self, numbers: Indices) -> Indices:
        """Convert training row numbers, 0 to n_train - 1, to row numbers in the data."""
        return numbers + np.searchsorted(self._before, numbers, side="right")

    def sample(self, n: int, *seed: int) -> Indices:
        """Sample at most n training rows from all the data or, with `samples_first`, from its first rows.

        A sample of neighbouring rows would fit b_dec to a single text.
        """
        generator = np.random.default_rng(seed)
        n_rows = self.n_first - len(self.held_out) if self.samples_first else self.n_train
        return self.rows(generator.choice(n_rows, min(n, n_rows), replace=False, shuffle=False))


def split_of(
    n_tokens: int,
    n_held_out: int,
    *seed: int,
    hold_out: HoldOut = "rows",
    texts: Texts | None = None,
    n_first: int | None = None,
    is_asked: bool = False,
) -> Split:
    """Return a `Split`; if there are too few texts, hold out blocks instead.

    If `is_asked` is true, the job explicitly requests texts, so raise `TooFewTexts` instead.
    """
    if hold_out != "texts":
        return Split(n_tokens, n_held_out, *seed, hold_out=hold_out, n_first=n_first)
    try:
        if texts is None:
            raise TooFewTexts("the texts of the rows are unknown")
        return Split(n_tokens, n_held_out, *seed, hold_out="texts", texts=texts, n_first=n_first)
    except TooFewTexts:
        if is_asked:
            raise
        return Split(n_tokens, n_held_out, *seed, hold_out="blocks", n_first=n_first)


def halves_of(labels: Indices) -> Indices:
    """Return each row's half, 0 or 1, given the label of its text; if possible, no text is in both halves.

    The longest texts are assigned first, each to the half with fewer rows. If a few long texts would leave one half
    with less than `LEAST_OF_HALF` of the rows, texts are split: contiguous ranges of rows alternate between the halves.
    Neighbours then mostly stay together, and both halves cover the data from beginning to end.
    """
    _, of_row, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    half_of, totals = np.zeros(len(sizes), np.int64), [0, 0]
    for text in np.argsort(-sizes, kind="stable").tolist():
        half_of[text] = half = int(totals[1] < totals[0])
        totals[half] += int(sizes[text])
    n = len(labels)
    if min(totals) >= LEAST_OF_HALF * n:
        return half_of[of_row]
    return np.arange(n) * min(N_RANGES, n) // n % 2


def _generator(seed: tuple[int, ...]) -> np.random.Generator:
    # 2**32 separates this random stream from the permutations of epochs, which are seeded with (seed, epoch).
    return np.random.default_rng((*seed, 2**32))


def _rows(n_rows: int, n_held_out: int, seed: tuple[int, ...]) -> Indices:
    """Choose individual rows at random."""
    return _generator(seed).choice(n_rows, n_held_out, replace=False, shuffle=False)


def _blocks(n_rows: int, n_held_out: int, seed: tuple[int, ...]) -> Indices:
    """Choose the first rows of random blocks of `BLOCK` neighbours, about the same number from each block.

    If many rows are requested, blocks are held out almost completely.
    """
    if not n_held_out:
        return np.zeros(0, np.int64)
    n_blocks = -(-n_rows // BLOCK)
    wanted = min(n_blocks, max(LEAST_BLOCKS, -(-n_held_out // BLOCK) + 1))
    begins = BLOCK * _generator(seed).choice(n_blocks, wanted, replace=False, shuffle=False)
    sizes = np.minimum(BLOCK, n_rows - begins)
    length = -(-n_held_out // wanted)
    # The last block may be shorter.
    while np.minimum(sizes, length).sum() < n_held_out:
        length += 1
    places = np.arange(length)
    return (begins[:, None] + places)[places < sizes[:, None]][:n_held_out]


def _texts(texts: Counts, n_rows: int, n_wanted: int, seed: Words) -> Counts:
    """Choose random texts of at most `n_wanted` rows each, until they contain at least `n_wanted` rows in total.

    If these texts are not enough, add longer texts, shortest first.
    """
    order = np.argsort(keys_of(texts.number, seed, texts.numbering), kind="stable")
    is_long = texts.n_rows[order] > n_wanted
    longer = order[is_long]
    candidates = np.concatenate([order[~is_long], longer[np.argsort(texts.n_rows[longer], kind="stable")]])
    totals = texts.n_rows[candidates].cumsum()
    n = min(len(totals), int(np.searchsorted(totals, n_wanted)) + 1)
    if totals[n - 1] == n_rows:
        n -= 1
    total = int(totals[n - 1]) if n else 0
    if total < n_wanted / 2 or total > max(2 * n_wanted, MOST_IN_TEXTS * n_rows):
        n_texts, longest = len(totals), int(texts.n_rows.max())
        raise TooFewTexts(f"the {n_rows:,} rows come from {n_texts:,} texts, and the longest has {longest:,} rows")
    return Counts(*(column[candidates[:n]] for column in texts))
