"""Adds up the energy that a card takes, from its stored readings: power, and the driver's counter where it has one."""

from __future__ import annotations

from typing import NamedTuple

# A reading stands for no more than so much time before and after it; longer is a gap, of which nothing is known.
LONGEST_GAP_S = 10.0
# The largest card takes 1.2 kW; a counter that says more than this has begun anew, or is broken.
MOST_W = 5000.0


class EnergyReading(NamedTuple):
    """What was read of a card at a time (seconds since the epoch); the counter is in J since the driver was loaded."""

    timestamp: float
    power_w: float | None = None
    counter_j: float | None = None


class Used(NamedTuple):
    """The energy of some time; of `lasted_s` seconds `known_s` were measured, `counted_s` of these by the counter."""

    joules: float = 0.0
    lasted_s: float = 0.0
    known_s: float = 0.0
    counted_s: float = 0.0

    def __add__(self, other: Used) -> Used:  # type: ignore[override]
        return Used(*(one + more for one, more in zip(self, other, strict=True)))


class CardMeter:
    """Measures one card from `begin` on; readings are added in the order of their times.

    Between two readings of the counter its difference counts, also over a gap; else the area under the power, by
    trapezoids, and up to `LONGEST_GAP_S` before the first reading and after the last, as long as they were no gap.
    """

    def __init__(self, begin: float) -> None:
        self._begin = begin
        # The last reading that has the power, and the time of the last of any.
        self._last: EnergyReading | None = None
        self._newest: float | None = None
        self._counter: EnergyReading | None = None
        # Since the last reading of the counter, whose next one takes its place.
        self._pending = Used()
        self._settled = Used()

    @property
    def newest(self) -> float:
        """The time of the last reading; at first that of the beginning."""
        return self._begin if self._newest is None else self._newest

    def add(self, reading: EnergyReading) -> None:
        """Add a reading; one that is not later than the last is passed over."""
        if reading.timestamp < self._begin or (self._newest is not None and reading.timestamp <= self._newest):
            return
        self._newest = reading.timestamp
        if reading.power_w is not None:
            self._pending += self._area(reading)
            self._last = reading
        if reading.counter_j is not None:
            self._count(reading)

    def used(self, end: float) -> Used:
        """Return what the card took from the beginning to `end`."""
        tail_s = end - (self._last.timestamp if self._last else self._begin)
        tail = Used()
        if self._last and self._last.power_w is not None and 0 < tail_s <= LONGEST_GAP_S:
            tail = Used(self._last.power_w * tail_s, 0.0, tail_s)
        total = self._settled + self._pending + tail
        return total._replace(lasted_s=max(0.0, end - self._begin))

    def _area(self, reading: EnergyReading) -> Used:
        """Return the area under the power since the last reading; nothing of a gap."""
        assert reading.power_w is not None
        seconds = reading.timestamp - (self._last.timestamp if self._last else self._begin)
        if seconds > LONGEST_GAP_S:
            return Used()
        before = self._last.power_w if self._last and self._last.power_w is not None else reading.power_w
        return Used((before + reading.power_w) / 2 * seconds, 0.0, seconds)

    def _count(self, reading: EnergyReading) -> None:
        """Settle the time since the counter was last read, by its difference where it can be believed."""
        last, self._counter = self._counter, reading
        if last and last.counter_j is not None and reading.counter_j is not None:
            joules, seconds = reading.counter_j - last.counter_j, reading.timestamp - last.timestamp
            if 0 <= joules <= MOST_W * seconds:
                self._pending = Used(joules, 0.0, seconds, seconds)
        self._settled, self._pending = self._settled + self._pending, Used()
