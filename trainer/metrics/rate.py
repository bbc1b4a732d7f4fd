"""A speed that a short interval does not throw off."""

from __future__ import annotations

import math

# Long against one step, short against what a user waits to see that a run has become slower.
WINDOW_S = 5.0


class Rate:
    """An amount per second, mostly of the last `WINDOW_S`.

    Amounts and seconds are summed and fade alike, so an interval counts by its length and not as one row of many.
    """

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> float:
        """Takes in an interval; the rate up to its end."""
        fade = math.exp(-seconds / WINDOW_S)
        self._amount = fade * self._amount + amount
        self._seconds = fade * self._seconds + seconds
        return self._amount / max(self._seconds, 1e-9)
