"""The recent past of one GPU: fixed-size columns, written by its sampler and read by many."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, Protocol

from sae_tui.gpu.base import GpuSample

CAPACITY = 600


class Reading(NamedTuple):
    """What is kept of a sample; None where the sensor did not answer."""

    timestamp: float
    utilization: float | None = None
    memory_used_bytes: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None


class Readable(Protocol):
    """Anything with the attributes of a reading: a live sample or a stored one."""

    @property
    def timestamp(self) -> float: ...
    @property
    def utilization(self) -> float | None: ...
    @property
    def memory_used_bytes(self) -> float | None: ...
    @property
    def temperature_c(self) -> float | None: ...
    @property
    def power_w(self) -> float | None: ...


class Ring:
    """The newest samples of one GPU. The lock is held for microseconds, so that nobody ever waits."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._lock = threading.Lock()
        self._columns: dict[str, deque[float | None]] = {name: deque(maxlen=capacity) for name in Reading._fields}
        self._latest: GpuSample | None = None
        self._n_live = 0

    def __len__(self) -> int:
        return len(self._columns["timestamp"])

    def append(self, sample: GpuSample) -> None:
        with self._lock:
            self._latest = sample
            self._n_live += 1
            for name, column in self._columns.items():
                column.append(getattr(sample, name))

    def extend_history(self, readings: Iterable[Readable]) -> None:
        """Puts stored readings, oldest first, before the live ones, in place of those put there before.

        What is not older than the first live one is left out.
        """
        with self._lock:
            stamps = self._columns["timestamp"]
            stored = max(0, len(stamps) - self._n_live)
            first = stamps[stored] if self._n_live else None
            older = [each for each in readings if first is None or each.timestamp < first]
            for name, column in self._columns.items():
                joined = [*(getattr(each, name) for each in older), *islice(column, stored, None)]
                column.clear()
                column.extend(joined)

    def latest(self) -> GpuSample | None:
        """The newest live sample."""
        return self._latest

    def column(self, name: str, n: int = CAPACITY) -> list[float | None]:
        """The last `n` values of a column, newest last; fewer where there are fewer."""
        with self._lock:
            newest_first = list(islice(reversed(self._columns[name]), n))
        newest_first.reverse()
        return newest_first

    def after(self, timestamp: float) -> list[Reading]:
        """The readings taken later than this time, oldest first."""
        with self._lock:
            rows = [Reading(*row) for row in zip(*self._columns.values(), strict=True)]
        return [row for row in rows if row.timestamp > timestamp]
