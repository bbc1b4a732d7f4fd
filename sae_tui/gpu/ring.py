"""One GPU's recent history: a ring buffer of samples, written by the sampler and read by several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, Protocol

from sae_tui.gpu.base import GpuSample, is_identified

CAPACITY = 600


class RingReading(NamedTuple):
    """The sample fields kept in the history; a field is None if its sensor did not respond."""

    timestamp: float
    utilization: float | None = None
    memory_used_bytes: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    memory_total_bytes: float | None = None
    energy_j: float | None = None  # Always None in readings from the store.

    @property
    def is_blank(self) -> bool:
        """True if the reading has no values, for example because the GPU could not be read."""
        return all(value is None for value in self[1:])


class Readable(Protocol):
    """An object with a reading's attributes, such as a live or a stored sample."""

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
    @property
    def memory_total_bytes(self) -> float | None: ...


class Ring:
    """A thread-safe ring buffer of one GPU's latest samples; its lock is held only for microseconds."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.power_limit_w: float | None = None  # The power limit in the latest sample that contains one.
        self._lock = threading.Lock()
        self._readings: deque[RingReading] = deque(maxlen=capacity)
        self._latest: GpuSample | None = None
        self._uuid = ""
        # The number of live readings for the current GPU, and for all GPUs since the start.
        self._n_live = self._n_appended = 0

    def __len__(self) -> int:
        return len(self._readings)

    def append(self, sample: GpuSample) -> None:
        """Add a sample; the first sample from another GPU at this index clears the previous GPU's readings."""
        with self._lock:
            if is_identified(sample):
                if self._uuid not in ("", sample.uuid):
                    self._readings.clear()
                    self._n_live, self.power_limit_w = 0, None
                self._uuid = sample.uuid
            self._latest = sample
            self._n_live += 1
            self._n_appended += 1
            self._readings.append(reading_of(sample))
            if sample.power_limit_w is not None:
                self.power_limit_w = sample.power_limit_w

    def extend_history(self, readings: Iterable[Readable], uuid: str) -> None:
        """Insert a GPU's stored readings, oldest first, before the live readings; replace earlier stored readings.

        Ignore readings not older than the first live reading. If another GPU now has this index, do nothing.
        """
        with self._lock:
            if self._uuid not in ("", uuid):
                return
            live = list(self._readings)[max(0, len(self._readings) - self._n_live) :]
            older = [reading_of(each) for each in readings if not live or each.timestamp < live[0].timestamp]
            self._readings.clear()
            self._readings.extend([*older, *live])

    def latest(self) -> GpuSample | None:
        """Return the latest live sample, or None before the first sample."""
        return self._latest

    def newest_first(self, n: int = CAPACITY) -> list[RingReading]:
        """Return up to `n` of the latest readings, newest first."""
        with self._lock:
            return list(islice(reversed(self._readings), n))

    def column(self, name: str, n: int = CAPACITY) -> list[float | None]:
        """Return up to `n` of the latest values of a field, oldest first."""
        return [getattr(reading, name) for reading in reversed(self.newest_first(n))]

    def since(self, position: int | None, uuid: str) -> tuple[list[RingReading], int]:
        """Return the live readings after a position, oldest first, and the new position.

        If `position` is None, return all readings. If the GPU at this index has another UUID, return no readings.
        Since the clock may be set back, positions count readings rather than time.
        """
        with self._lock:
            if self._uuid not in ("", uuid):
                return [], self._n_appended
            if position is None:
                return list(self._readings), self._n_appended
            n_new = min(self._n_appended - position, self._n_live, len(self._readings))
            return list(self._readings)[len(self._readings) - n_new :], self._n_appended


def reading_of(of: Readable) -> RingReading:
    """Return a reading with a sample's history fields."""
    return RingReading(of.timestamp, *(getattr(of, name, None) for name in RingReading._fields[1:]))
