"""A history scaled to the available columns; for any other history, only the latest values are drawn."""

from __future__ import annotations


class Period(tuple[float | None, ...]):
    """Values at equal time steps in a period, oldest first; unknown values are None."""

    def in_columns(self, n: int) -> tuple[float | None, ...]:
        """Return at most `n` columns; each contains the mean of the known values in its part of the period."""
        length = len(self)
        n = min(n, length)
        return tuple(_mean(self[column * length // n : (column + 1) * length // n]) for column in range(n))


def _mean(values: tuple[float | None, ...]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
