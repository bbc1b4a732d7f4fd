"""Finds held-out rows that duplicate training rows, because the FVU on such rows says nothing about new rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainer.activations.training_data import HookRows

# The maximum number of held-out rows to check.
MOST_HELD_OUT = 32_768
_BATCH = 4096
# The number of values at the start of a row that are compared first.
_FEW = 16


def copies_in(rows: HookRows, seed: int) -> float | None:
    """Return the fraction of this rank's held-out rows that are bitwise equal to a row in a sample of training rows.

    Zero rows are ignored. Return None if no rows are held out. Rows are reread rather than kept in memory, because
    reading and hashing 32,768 rows of 2,304 16-bit numbers from each of the two sets takes only 0.3 s.
    """
    if not rows.n_held_out:
        return None
    sample = rows.sample(seed)[0]
    starts = set(_hashes(sample[:, :_FEW]))
    training: set[int] | None = None
    n_seen = n_found = 0
    for x, _ in rows.held_out(_BATCH):
        own = x[(x != 0).any(dim=1)]
        n_seen += len(own)
        # Hash whole rows only if they start like a training row, because that takes several times as long.
        alike = [place for place, start in enumerate(_hashes(own[:, :_FEW])) if start in starts]
        if alike and training is None:
            training = set(_hashes(sample))
        n_found += sum(one in (training or ()) for one in _hashes(own[alike]))
        if n_seen >= MOST_HELD_OUT:
            break
    return n_found / n_seen if n_seen else None


def _hashes(rows: Tensor) -> list[int]:
    """Return a 64-bit hash of each row in [n, d]."""
    return [hash(row.tobytes()) for row in rows.contiguous().view(torch.uint8).numpy()]
