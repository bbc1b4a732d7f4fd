"""Splits tokens and latents across ranks in proportion to the ranks' speeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from trainer.contract.planning.plan import words_of_shares

# Speeds that differ by less than this factor are treated as equal, because measurements that take only milliseconds are
# imprecise.
LEAST_UNEVEN = 1.15
# Every rank gets at least this fraction of an even share, because a rank may have been slow only during the
# measurement.
LEAST_SHARE = 0.1


class Shares(NamedTuple):
    """Each grid row's share of the tokens, and each grid column's share of the latents; only the ratios matter."""

    tokens: tuple[float, ...]
    latents: tuple[float, ...]

    def sentence(self) -> str:
        """Return the shares as text, like `tokens per rank now 60 % / 40 %`."""
        return ", ".join(words_of_shares(*self, " now")) or "tokens and latents are now shared evenly"


def even(n_rows: int, n_columns: int) -> Shares:
    """Return equal shares for a grid of `n_rows` by `n_columns`."""
    return Shares((1.0,) * n_rows, (1.0,) * n_columns)


def by_speed(speeds: Sequence[float], n_columns: int, capacity: Sequence[float] | None = None) -> Shares:
    """Return shares in proportion to the ranks' speeds, listed row by row of the grid.

    A column's speed is the mean over its ranks, which all have the same latents. A row is as fast as its slowest rank.
    `capacity` is, for each rank, the largest fraction of all latents that fits into its memory.
    """
    rows = [speeds[start : start + n_columns] for start in range(0, len(speeds), n_columns)]
    if max(speeds) < LEAST_UNEVEN * min(speeds):
        latents = even(len(rows), n_columns).latents
    else:
        latents = tuple(map(statistics.fmean, zip(*rows, strict=True)))
    latents = _limit(latents, _column_capacity(capacity, n_columns))
    tokens = tuple(1 / max(share / speed for share, speed in zip(latents, row, strict=True)) for row in rows)
    if max(tokens) < LEAST_UNEVEN * min(tokens):
        tokens = (1.0,) * len(rows)
    return Shares(_at_least(tokens), _at_least(latents))


def _column_capacity(capacity: Sequence[float] | None, n_columns: int) -> list[float] | None:
    return None if capacity is None else [min(capacity[column::n_columns]) for column in range(n_columns)]


def _limit(shares: Sequence[float], capacity: Sequence[float] | None) -> tuple[float, ...]:
    """Normalise shares to a sum of 1 and limit each to its `capacity`, unless the total capacity is at most 1."""
    shares = [share / sum(shares) for share in shares]
    if capacity is None or sum(capacity) <= 1:
        return tuple(shares)
    for _ in shares:
        over = sum(max(0.0, share - most) for share, most in zip(shares, capacity, strict=True))
        if over <= 1e-9:
            break
        free = sum(share for share, most in zip(shares, capacity, strict=True) if share < most)
        shares = [
            most if share >= most else share * (1 + over / free) for share, most in zip(shares, capacity, strict=True)
        ]
    return tuple(shares)


def _at_least(shares: Sequence[float]) -> tuple[float, ...]:
    least = LEAST_SHARE * sum(shares) / len(shares)
    return tuple(max(share, least) for share in shares)


def parse_shares(text: str, n_columns: int) -> Shares:
    """Parse the setting `parallel.shares`: one number per rank, like `3:2`."""
    return by_speed([float(part) for part in text.split(":")], n_columns)
