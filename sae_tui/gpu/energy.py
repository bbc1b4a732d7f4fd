"""Computes a GPU's energy use from its stored power readings, and from its energy counter if it has one."""

from __future__ import annotations

from typing import NamedTuple

# A power reading is valid for at most this long before and after it; a longer interval is a gap without data.
LONGEST_GAP_S = 10.0
# The largest GPU draws 1.2 kW; a counter that implies more than this limit was reset or is broken.
MOST_W = 5000.0


class EnergyReading(NamedTuple):
    """A stored reading: seconds since the epoch, power, and the energy counter in J since the driver was loaded."""

    timestamp: float
    power_w: float | None = None
    counter_j: float | None = None


class Used(NamedTuple):
    """The energy of an interval, and its seconds: elapsed, measured, and measured by the hardware counter."""

    joules: float = 0.0
    lasted_s: float = 0.0
    known_s: float = 0.0
    counted_s: float = 0.0

    def __add__(self, other: Used) -> Used:  # type: ignore[override]
        return Used(*(one + more for one, more in zip(self, other, strict=True)))


class GpuMeter:
    """Measures the energy that one GPU has used since `begin`; readings must arrive in chronological order.

    Between two counter readings, even across a gap, the energy is their difference. Otherwise it is the power
    integrated by the trapezoidal rule, extended to `begin` and to the end if these are within `LONGEST_GAP_S`.
    """

    def __init__(self, begin: float) -> None:
        self._begin = begin
        # The last reading with a power value, and the time of the last reading of any kind.
        self._last: EnergyReading | None = None
        self._newest: float | None = None
        self._counter: EnergyReading | None = None
        # The energy since the last counter reading; the next counter reading replaces it.
        self._pending = Used()
        self._settled = Used()

    @property
    def newest(self) -> float:
        """The time of the last reading; before the first reading, the start time."""
        return self._begin if self._newest is None else self._newest

    def add(self, reading: EnergyReading) -> None:
        """Add a reading; ignore it unless it is later than the last one."""
        if reading.timestamp < self._begin or (self._newest is not None and reading.timestamp <= self._newest):
            return
        self._newest = reading.timestamp
        if reading.power_w is not None:
            self._pending += self._area(reading)
            self._last = reading
        if reading.counter_j is not None:
            self._count(reading)

    def used(self, end: float) -> Used:
        """Return the energy that the GPU has used from `begin` to `end`."""
        tail_s = end - (self._last.timestamp if self._last else self._begin)
        tail = Used()
        if self._last and self._last.power_w is not None and 0 < tail_s <= LONGEST_GAP_S:
            tail = Used(self._last.power_w * tail_s, 0.0, tail_s)
        total = self._settled + self._pending + tail
        return total._replace(lasted_s=max(0.0, end - self._begin))

    def _area(self, reading: EnergyReading) -> Used:
        """Return the power integrated since the last reading; zero for a gap."""
        assert reading.power_w is not None
        seconds = reading.timestamp - (self._last.timestamp if self._last else self._begin)
        if seconds > LONGEST_GAP_S:
            return Used()
        before = self._last.power_w if self._last and self._last.power_w is not None else reading.power_w
        return Used((before + reading.power_w) / 2 * seconds, 0.0, seconds)

    def _count(self, reading: EnergyReading) -> None:
        """Finalise the interval since the last counter reading, using the counter's difference if it is plausible."""
        last, self._counter = self._counter, reading
        if last and last.counter_j is not None and reading.counter_j is not None:
            joules, seconds = reading.counter_j - last.counter_j, reading.timestamp - last.timestamp
            if 0 <= joules <= MOST_W * seconds:
                self._pending = Used(joules, 0.0, seconds, seconds)
        self._settled, self._pending = self._settled + self._pending, Used()
