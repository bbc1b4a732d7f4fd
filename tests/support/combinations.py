"""Chooses combinations of parameters for Triton's interpreter, where a full product takes minutes.

On a GPU and with EXAMPLES=explore all combinations run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

ALL = os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("EXAMPLES") == "explore"


def combined(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of the choices: all of them, or few in which each pair of choices occurs."""
    numbers = [*itertools.product(*(range(len(one)) for one in choices))]
    if not ALL:
        numbers = [*_with_each_pair(numbers)]
    return [tuple(one[number] for one, number in zip(choices, places, strict=True)) for places in numbers]


def _with_each_pair(numbers: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the combination with the most new pairs until there is none."""
    pairs = {places: {*itertools.combinations(enumerate(places), 2)} for places in numbers}
    missing = set().union(*pairs.values())
    while missing:
        best = max(numbers, key=lambda places: len(pairs[places] & missing))
        missing -= pairs[best]
        yield best
