"""Chooses test parameters: combinations for Triton's interpreter, and the cases that run on every change.

All combinations would take minutes in the interpreter. The tests run all of them only on a GPU or with
EXAMPLES=explore.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import pytest

ALL = os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("EXAMPLES") == "explore"


def slow_except(fast: Collection[Any], choices: Iterable[Any]) -> list[Any]:
    """Return the choices as parameters, with all but the fast ones marked `slow`."""
    return [one if one in fast else pytest.param(one, marks=pytest.mark.slow) for one in choices]


def slow_unless(is_fast: Callable[..., bool], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return cases of several values as parameters, marked `slow` unless the function returns True for their values."""
    return [case if is_fast(*case) else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def combined(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations of the choices, or a few combinations that include every pair of choices."""
    numbers = [*itertools.product(*(range(len(one)) for one in choices))]
    if not ALL:
        numbers = [*_with_each_pair(numbers)]
    return [tuple(one[number] for one, number in zip(choices, places, strict=True)) for places in numbers]


def _with_each_pair(numbers: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Repeatedly yield the combination with the most pairs not yet yielded, until no such pairs are left."""
    pairs = {places: {*itertools.combinations(enumerate(places), 2)} for places in numbers}
    missing = set().union(*pairs.values())
    while missing:
        best = max(numbers, key=lambda places: len(pairs[places] & missing))
        missing -= pairs[best]
        yield best
