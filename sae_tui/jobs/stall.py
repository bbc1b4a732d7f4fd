"""When a run counts as stalled."""

from __future__ import annotations

from collections import deque

STALLED_AFTER_S = 60.0
TIMES_MEDIAN = 10


class StallWatch:
    """Compares the time since the last sign of progress with the usual time between two."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._since = 0.0
        self._paces: deque[float] = deque(maxlen=63)

    def stalled(self, step: int, now: float) -> bool:
        """Whether no step came for max(60 s, 10 × the median); `now` is monotonic seconds."""
        if step != self._step:
            if self._step is not None:
                self._paces.append(now - self._since)
            self._step, self._since = step, now
        return now - self._since > self.limit_s

    @property
    def limit_s(self) -> float:
        median = sorted(self._paces)[len(self._paces) // 2] if self._paces else 0.0
        return max(STALLED_AFTER_S, TIMES_MEDIAN * median)
