"""What all GPUs did at the same times: their samples on one grid of intervals of the clock.

A card that answers slowly, or later than the others, would else be drawn at another time than they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sae_tui.gpu.ring import Reading, Ring
from sae_tui.gpu.sampler import SILENT_AFTER_S, interval_of

# A reading; one without values where nothing is known; None where a reading is missing that was due.
Slot = Reading | None
BLANK = Reading(0.0)


@dataclass(frozen=True, slots=True)
class Past:
    """The last intervals, oldest first, of every card by index, and the limit of power that each told last."""

    slots: Mapping[int, Sequence[Slot]]
    power_limits_w: Mapping[int, float | None]

    def column(self, index: int, name: str, n: int) -> list[float | None]:
        """The last `n` values of a card, newest last, one per interval; None where there is none."""
        return [slot and getattr(slot, name) for slot in self.slots[index][-n:]] if n else []


def past(rings: Mapping[int, Ring], n: int, *, interval_s: float, now: float) -> Past:
    """The last `n` intervals of these cards; the newest is the one of now, or the one before where none has it yet."""
    rows = {index: ring.newest_first() for index, ring in rings.items()}
    running = interval_of(now, interval_s)
    begun = any(row and interval_of(row[0].timestamp, interval_s) == running for row in rows.values())
    last = running if begun else running - 1
    return Past(
        slots={index: on_grid(row, last, n, interval_s) for index, row in rows.items()},
        power_limits_w={index: ring.power_limit_w for index, ring in rings.items()},
    )


def on_grid(newest_first: Iterable[Reading], last: int, n: int, interval_s: float) -> list[Slot]:
    """The readings of a card on the `n` intervals up to `last`; the newest of an interval counts.

    For as long as a card may be silent before it is told so, its last reading stands.
    """
    first = last - n + 1
    reach = math.ceil(SILENT_AFTER_S / interval_s) + 2  # one more for the reading, one for the round of the sampler
    slots: list[Slot] = [BLANK] * n
    after: tuple[int, Reading] | None = None
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
    before: tuple[int, Reading] | None,
    after: tuple[int, Reading] | None,
    reach: int,
) -> None:
    """Fill the intervals between two readings: with the first of them while they are few."""
    start = before[0] + 1 if before else first
    end = after[0] if after else last + 1
    near_before = start - 1 + reach if before and not before[1].is_blank else start - 1
    near_after = end if after and after[1].is_blank else end - reach
    for at in range(max(start, first), end):
        if before and near_before >= end:
            slots[at - first] = before[1]
        elif at <= near_before or at >= near_after:
            slots[at - first] = None
