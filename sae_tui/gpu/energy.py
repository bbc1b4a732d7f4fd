"""Computes a GPU's energy use from its stored power readings, and from its energy counter if it has one."""

from __future__ import annotations

from typing import NamedTuple

# If two power readings are further apart than this, the energy used between them counts as unknown.
LONGEST_GAP_S = 10.0
# GPUs draw at most 1.2 kW, so a counter that implies more power than this limit was reset or is broken.
MOST_W = 5000.0


class EnergyReading(NamedTuple):
    """A stored reading: the time (in s since the epoch), the power, and the energy used since the driver was loaded."""

    timestamp: float
    power_w: float | None = None
    counter_j: float | None = None


class Used(NamedTuple):
    """The energy used in an interval, and the interval's duration.

    `lasted_s` is the total duration, `known_s` is the part covered by measurements, and `counted_s` is the part covered
    by the hardware counter.
    """

    joules: float = 0.0
    lasted_s: float = 0.0
    known_s: float = 0.0
    counted_s: float = 0.0

    def __add__(self, other: Used) -> Used:  # type: ignore[override]
        return Used(*(one + more for one, more in zip(self, other, strict=True)))


class GpuMeter:
    """Measures the energy used by one GPU since `begin`; readings must arrive in chronological order.

    The energy used between two counter readings is their difference, even across a gap. Where there are no counter
    readings, power is integrated using the trapezoidal rule. The first power reading is also used for the time before
    it, and the last one for the time after it, for up to `LONGEST_GAP_S` each.
    """

    def __init__(self, begin: float) -> None:
        self._begin = begin
        # The last reading with a power value, and the time of the last reading of any kind.
        self._last: EnergyReading | None = None
        self._newest: float | None = None
        self._counter: EnergyReading | None = None
        # The energy used since the last counter reading, computed from power readings. The next counter reading
        # replaces it.
        self._pending = Used()
        self._settled = Used()

    @property
    def newest(self) -> float:
        """The time of the last reading, or the start time before the first reading."""
        return self._begin if self._newest is None else self._newest

    def add(self, reading: EnergyReading) -> None:
        """Add a reading if it is later than the last one; otherwise, ignore it."""
        if reading.timestamp < self._begin or (self._newest is not None and reading.timestamp <= self._newest):
            return
        self._newest = reading.timestamp
        if reading.power_w is not None:
            self._pending += self._area(reading)
            self._last = reading
        if reading.counter_j is not None:
            self._count(reading)

    def used(self, end: float) -> Used:
        """Return the energy used by the GPU from `begin` to `end`."""
        tail_s = end - (self._last.timestamp if self._last else self._begin)
        tail = Used()
        if self._last and self._last.power_w is not None and 0 < tail_s <= LONGEST_GAP_S:
            tail = Used(self._last.power_w * tail_s, 0.0, tail_s)
        total = self._settled + self._pending + tail
        return total._replace(lasted_s=max(0.0, end - self._begin))

    def _area(self, reading: EnergyReading) -> Used:
        """Return the energy used since the last power reading, or zero if that reading is too old."""
        assert reading.power_w is not None
        seconds = reading.timestamp - (self._last.timestamp if self._last else self._begin)
        if seconds > LONGEST_GAP_S:
            return Used()
        before = self._last.power_w if self._last and self._last.power_w is not None else reading.power_w
        return Used((before + reading.power_w) / 2 * seconds, 0.0, seconds)

    def _count(self, reading: EnergyReading) -> None:
        """Finalise the interval since the last counter reading; use the counter's difference if it is plausible."""
        last, self._counter = self._counter, reading
        if last and last.counter_j is not None and reading.counter_j is not None:
            joules, seconds = reading.counter_j - last.counter_j, reading.timestamp - last.timestamp
            if 0 <= joules <= MOST_W * seconds:
                self._pending = Used(joules, 0.0, seconds, seconds)
        self._settled, self._pending = self._settled + self._pending, Used()
