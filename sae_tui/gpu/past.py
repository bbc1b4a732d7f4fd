"""Aligns samples from all GPUs to a common grid of clock intervals.

Without this grid, readings from a slowly responding GPU would be drawn later than the other GPUs' readings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sae_tui.gpu.period import Period
from sae_tui.gpu.ring import Ring, RingReading
from sae_tui.gpu.sampler import SILENT_AFTER_S, interval_of

# The value of an interval: a reading, `BLANK` if nothing is known, or None if a reading was due but is missing.
Slot = RingReading | None
BLANK = RingReading(0.0)


@dataclass(frozen=True, slots=True)
class RecentHistory:
    """Each GPU's readings in the latest intervals, oldest first, and its last reported power limit."""

    slots: Mapping[int, Sequence[Slot]]
    power_limits_w: Mapping[int, float | None]
    is_period: bool = False  # True if the entire history is drawn, scaled to the available columns.

    def column(self, index: int, name: str, n: int) -> Sequence[float | None]:
        """Return the last `n` values of a GPU's field `name`, oldest first, or all values if this is a period.

        Missing values are None.
        """
        if self.is_period:
            return Period(slot and getattr(slot, name) for slot in self.slots[index])
        return [slot and getattr(slot, name) for slot in self.slots[index][-n:]] if n else []


def past(rings: Mapping[int, Ring], n: int, *, interval_s: float, now: float) -> RecentHistory:
    """Return these GPUs' readings in the last `n` intervals.

    The last interval is the current one, or the previous one if no GPU has a reading in the current one yet.
    """
    rows = {index: ring.newest_first() for index, ring in rings.items()}
    running = interval_of(now, interval_s)
    begun = any(row and interval_of(row[0].timestamp, interval_s) == running for row in rows.values())
    last = running if begun else running - 1
    return RecentHistory(
        slots={index: on_grid(row, last, n, interval_s) for index, row in rows.items()},
        power_limits_w={index: ring.power_limit_w for index, ring in rings.items()},
    )


def merge(
    stored: Sequence[RingReading], remembered: Sequence[RingReading], interval_s: float, now: float
) -> list[RingReading]:
    """Return a GPU's stored readings, with gaps filled by readings buffered by its driver.

    The driver's clock may differ from the system clock, so omit buffered readings later than `now`.
    """
    known = {interval_of(reading.timestamp, interval_s) for reading in stored}
    fresh = [one for one in remembered if one.timestamp <= now and interval_of(one.timestamp, interval_s) not in known]
    return sorted([*stored, *fresh], key=lambda reading: reading.timestamp)


def on_grid(newest_first: Iterable[RingReading], last: int, n: int, interval_s: float) -> list[Slot]:
    """Return a GPU's latest reading in each of the `n` intervals up to `last`.

    A reading is repeated in the following empty intervals for as long as a GPU may be silent (`SILENT_AFTER_S`).
    """
    first = last - n + 1
    reach = math.ceil(SILENT_AFTER_S / interval_s) + 2  # Allow one interval each for the read and the sampler's cycle.
    slots: list[Slot] = [BLANK] * n
    after: tuple[int, RingReading] | None = None
    for reading in newest_first:
        at = interval_of(reading.timestamp, interval_s)
        if at > last or (after and at >= after[0]):
            continue
        _bridge(slots, first, last, (at, reading), after, reach)
        if at < first:
            return slots
        slots[at - first] = reading
        after = (at, reading)
    _bridge(slots, first, last, None, after, reach)
    return slots


def _bridge(
    slots: list[Slot],
    first: int,
    last: int,
    before: tuple[int, RingReading] | None,
    after: tuple[int, RingReading] | None,
    reach: int,
) -> None:
    """Fill the intervals between two readings.

    In a short gap, repeat the first reading. In a long gap, set the intervals near a reading to None, and leave the
    other intervals `BLANK`.
    """
    start = before[0] + 1 if before else first
    end = after[0] if after else last + 1
    near_before = start - 1 + reach if before and not before[1].is_blank else start - 1
    near_after = end if after and after[1].is_blank else end - reach
    for at in range(max(start, first), end):
        if before and near_before >= end:
            slots[at - first] = before[1]
        elif at <= near_before or at >= near_after:
            slots[at - first] = None
