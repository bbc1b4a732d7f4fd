"""Determines the order in which training uses stored rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trainer.activations.base import Indices
from trainer.activations.permutation import permutation
from trainer.activations.split import Split


class Order:
    """An endless sequence of epochs, each a seeded permutation of all training rows.

    A batch is a contiguous slice of this sequence. Therefore, a batch can span the end of one epoch and the start of
    the next, no token is lost, and a checkpoint only has to store a position. Runs of `run` neighbouring rows stay
    together.
    """

    def __init__(self, split: Split, seed: int, run: int = 1) -> None:
        self._split, self._seed, self._run = split, seed, run

    def token_slice(self, start: int, length: int) -> Indices:
        """Return the row numbers at positions start .. start + length - 1."""
        n, end = self._split.n_train, start + length
        numbers = [
            self._epoch(epoch)(np.arange(max(start - epoch * n, 0), min(end - epoch * n, n)))
            for epoch in range(start // n, -(-end // n))
        ]
        return self._split.rows(np.concatenate(numbers))

    def _epoch(self, epoch: int) -> Callable[[Indices], Indices]:
        return permutation(self._split.n_train, self._run, self._seed, epoch)
