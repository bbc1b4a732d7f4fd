"""The Pareto front: who is not beaten in both of two things of which less is better."""

from __future__ import annotations

import math
from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]]) -> set[int]:
    """The places of the points that no other is at least as low as in both, and lower in one."""
    found: set[int] = set()
    lowest, last = math.inf, (math.nan, math.nan)
    for place in sorted(range(len(points)), key=lambda place: points[place]):
        if points[place][1] < lowest or points[place] == last:
            found.add(place)
            lowest, last = points[place][1], points[place]
    return found
