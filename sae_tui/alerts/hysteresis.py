"""Decides when a value has been bad long enough to raise an alert, or good long enough to clear it."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

# The value of an object that no longer exists, such as a removed GPU.
GONE = -math.inf
# An alert raised three times within an hour is flapping. It is cleared only after 5 min of good values, or after twice
# the longest good period in the last hour if that is longer, so that a periodic fault does not raise an alert each
# time.
FLAPS_AT, HOUR_S, LEAST_CALM_S = 3, 3600.0, 300.0


class Rule(NamedTuple):
    """The conditions for raising and clearing an alert.

    An alert is raised after `raise_s` seconds at or above `raise_at`, and cleared after `clear_s` seconds below
    `clear_at`.
    """

    raise_at: float
    clear_at: float
    raise_s: float
    clear_s: float


class Hysteresis:
    """Tracks one value and its alert. Times are in seconds, from any monotonic clock."""

    def __init__(self, rule: Rule, *, is_raised: bool = False) -> None:
        self.is_raised = is_raised
        self._rule = rule
        self._since: float | None = None
        self._raised: deque[float] = deque(maxlen=FLAPS_AT)
        # The time when the value was last bad, and the end and duration of each long good period.
        self._bad_at: float | None = None
        self._returns: deque[tuple[float, float]] = deque(maxlen=64)

    def changes(self, value: float | None, now: float) -> bool:
        """Process a value, which is None if unknown; return whether it raises or clears the alert.

        An unknown value does not change the alert.
        """
        self._note_return(value, now)
        if not self._is_leaving(value):
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        if now - self._since < self._lasts_s(value, now):
            return False
        self.is_raised, self._since = not self.is_raised, None
        if self.is_raised:
            self._raised.append(now)
        return True

    @property
    def flaps(self) -> bool:
        """Whether the alert has been raised three times within an hour."""
        return len(self._raised) == FLAPS_AT and self._raised[-1] - self._raised[0] <= HOUR_S

    def _lasts_s(self, value: float | None, now: float) -> float:
        """Return how many seconds the value must stay bad to raise the alert, or good to clear it."""
        if not self.is_raised:
            return self._rule.raise_s
        return max(self._rule.clear_s, self._calm_s(now)) if self.flaps and value != GONE else self._rule.clear_s

    def _calm_s(self, now: float) -> float:
        """Return how many seconds the value must stay good before a flapping alert is cleared."""
        longest = max((good_s for at, good_s in self._returns if now - at <= HOUR_S), default=0.0)
        return min(HOUR_S, max(LEAST_CALM_S, 2 * longest))

    def _note_return(self, value: float | None, now: float) -> None:
        if value is None or value < self._rule.clear_at:
            return
        if self._bad_at is not None and now - self._bad_at > LEAST_CALM_S / 2:
            self._returns.append((now, now - self._bad_at))
        self._bad_at = now

    def _is_leaving(self, value: float | None) -> bool:
        """Return whether the value contradicts the state: a bad value without an alert, or a good value during one."""
        if value is None:
            return False
        return value < self._rule.clear_at if self.is_raised else value >= self._rule.raise_at
