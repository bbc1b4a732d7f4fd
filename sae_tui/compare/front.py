"""Finds the Pareto front of points with two coordinates; lower is better."""

from __future__ import annotations

import math
from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Return the indices of points that are not dominated: no other is as low in both coordinates and lower in one."""
    places: set[int] = set()
    lowest, last = math.inf, (math.nan, math.nan)
    for place in sorted(range(len(points)), key=lambda place: points[place]):
        if points[place][1] < lowest or points[place] == last:
            places.add(place)
            lowest, last = points[place][1], points[place]
    return places
