"""When a run counts as stalled."""

from __future__ import annotations

from collections import deque

TIMES_MEDIAN = 10


class StallWatch:
    """Compares the time since the last sign of progress, a step or another phase, with the usual time between two."""

    def __init__(self, after_s: float, now: float) -> None:
        self._after_s = after_s
        self._place: tuple[str, int] | None = None
        self._since = now
        self._paces: deque[float] = deque(maxlen=63)

    def stalled(self, place: tuple[str, int], now: float) -> bool:
        """Whether nothing came for `limit_s`; `now` is monotonic seconds."""
        if place != self._place:
            # From one phase to another takes what it takes, a start many times a step.
            if self._place is not None and place[0] == self._place[0]:
                self._paces.append(now - self._since)
            self._place, self._since = place, now
        return self.quiet_s(now) > self.limit_s

    def begin(self, now: float) -> None:
        """From here on the next sign is waited for."""
        self._since = now

    def quiet_s(self, now: float) -> float:
        """Seconds since the last sign."""
        return now - self._since

    @property
    def limit_s(self) -> float:
        median = sorted(self._paces)[len(self._paces) // 2] if self._paces else 0.0
        return max(self._after_s, TIMES_MEDIAN * median)
