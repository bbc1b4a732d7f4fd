"""Sums over the rows from each measured text, for comparing two SAEs on the same rows.

Difficult texts increase the errors of both SAEs, so the difference between their FVUs is far more precise than either
FVU.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from trainer.contract.json_file import read_json

SUMS = "card_sums.json"
# A difference is significant only if it exceeds this number of standard errors.
LEAD = 2.0
# The maximum number of sums to store; with more texts, each sum covers several texts. 4,096 sums take 160 kB.
MOST_CLUSTERS = 4096


class RowSums(msgspec.Struct, frozen=True):
    """Squared errors ‖y − x̂‖² and spreads ‖y − mean‖², summed over the rows from each text, in a fixed order.

    `rows` is a hash of the rows and their clusters; equal hashes mean the same rows in the same order.
    """

    rows: str
    errors: list[float]
    spreads: list[float]

    @property
    def fvu(self) -> float:
        total = math.fsum(self.spreads)
        return math.fsum(self.errors) / total if total else math.nan

    @property
    def is_valid(self) -> bool:
        numbers = (*self.errors, *self.spreads)
        return len(self.errors) == len(self.spreads) > 1 and all(0 <= one < math.inf for one in numbers)


def read_sums(folder: Path, fvu: float) -> RowSums | None:
    """Return the sums stored next to a report card with the given FVU, or None if they are missing or do not match."""
    sums = read_json(folder / SUMS, RowSums)
    is_of_card = sums is not None and sums.is_valid and math.isclose(sums.fvu, fvu, rel_tol=1e-4)
    return sums if is_of_card else None


def paired_error(one: RowSums, other: RowSums) -> float | None:
    """Return the standard error over texts of the difference between two FVUs (delta method); None if rows differ."""
    if one.rows != other.rows or len(one.errors) != len(other.errors):
        return None
    n = len(one.errors)
    pairs = zip(_leverages(one), _leverages(other), strict=True)
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in pairs) * n / (n - 1))


def _leverages(sums: RowSums) -> list[float]:
    """Return the influence of each text on the FVU."""
    total, fvu = math.fsum(sums.spreads), sums.fvu
    return [(error - fvu * spread) / total for error, spread in zip(sums.errors, sums.spreads, strict=True)]
