"""Remembers recent readings of the listed processes, in memory only, for the graphs on a process's page."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from sae_tui.gpu.processes import ProcessDetails

MOST_READINGS = 240  # per process: 12 minutes while the list is open, and 4 minutes while a process's page is open
# A value is drawn until the next reading of the list, but at most for this long.
_HOLDS_S = 4.0


class ProcessReading(NamedTuple):
    """A process's values at one monotonic time; None means "unknown"."""

    time: float
    sm_percent: float | None
    memory_used_bytes: float | None
    cpu_percent: float | None
    host_memory_bytes: float | None


class ProcessHistory:
    """The recent readings of the processes in one list."""

    def __init__(self) -> None:
        self._readings: dict[Hashable, deque[ProcessReading]] = {}

    def add(self, processes: Iterable[ProcessDetails], now: float) -> None:
        """Add a reading of each process, and forget all processes that are no longer listed."""
        old, self._readings = self._readings, {}
        for one in processes:
            readings = self._readings[one.key] = old.get(one.key) or deque(maxlen=MOST_READINGS)
            values = one.sm_percent, one.memory_used_bytes, one.cpu_percent, one.host_memory_bytes
            readings.append(ProcessReading(now, *values))

    def of(self, process: ProcessDetails) -> Sequence[ProcessReading]:
        """Return a process's readings, oldest first."""
        return tuple(self._readings.get(process.key, ()))


def in_columns(readings: Iterable[ProcessReading], field: str, n: int, span_s: float, now: float) -> list[float | None]:
    """Return the means of a field in `n` equal parts of the last `span_s` seconds.

    A part without a reading repeats the previous value, or is None if that value is too old. The parts begin at
    multiples of their length, so that a value stays in its column until all columns move.
    """
    step = span_s / n
    last = math.floor(now / step)
    found: list[list[float]] = [[] for _ in range(n)]
    held: list[float | None] = [None] * n
    for reading in readings:
        value, column = getattr(reading, field), math.floor(reading.time / step) - last + n - 1
        if value is None:
            continue
        if 0 <= column < n:
            found[column].append(value)
        until = math.floor((reading.time + _HOLDS_S) / step) - last + n - 1
        for place in range(max(0, column), min(n, until + 1)):
            held[place] = value
    return [sum(values) / len(values) if values else before for values, before in zip(found, held, strict=True)]
