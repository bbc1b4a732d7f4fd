"""Chooses combinations of parameters for Triton's interpreter, in which all combinations would take minutes.

On a GPU, and with EXAMPLES=explore, all combinations are used.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

ALL = os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("EXAMPLES") == "explore"


def combined(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations of the choices, or a few combinations that contain each pair of choices."""
    numbers = [*itertools.product(*(range(len(one)) for one in choices))]
    if not ALL:
        numbers = [*_with_each_pair(numbers)]
    return [tuple(one[number] for one, number in zip(choices, places, strict=True)) for places in numbers]


def _with_each_pair(numbers: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Repeatedly yield the combination with the most new pairs, until no pair is new."""
    pairs = {places: {*itertools.combinations(enumerate(places), 2)} for places in numbers}
    missing = set().union(*pairs.values())
    while missing:
        best = max(numbers, key=lambda places: len(pairs[places] & missing))
        missing -= pairs[best]
        yield best
