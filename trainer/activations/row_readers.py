"""Splits the work of reading a batch across ranks that use the same tokens, and assembles the batch on each rank."""

from __future__ import annotations

import numpy as np
import torch

from trainer.activations.base import Indices, Pair
from trainer.parallel.group import Group


def own_rows(indices: Indices, readers: Group) -> Indices:
    """Return the row numbers, in ascending order, of this rank's part of a batch.

    All ranks read the same number of rows: the last row of the batch is repeated until the parts are equal in size.
    """
    n_each = -(-len(indices) // readers.size)
    places = np.arange(readers.index * n_each, (readers.index + 1) * n_each)
    rows: Indices = np.sort(indices, kind="stable")[places.clip(max=len(indices) - 1)]
    return rows


class Exchange:
    """The all-gather of `n_rows` batch rows among the readers; `own` contains this rank's rows (see `own_rows`).

    All readers must start their exchanges in the same order. A single reader sends nothing.
    """

    def __init__(self, own: Pair, n_rows: int, readers: Group) -> None:
        self._own, self._n_rows, self._readers = own, n_rows, readers
        x, y = own
        parts = [] if readers.size == 1 else [x] if y is x else [x, y]
        # Send bytes, because not every communication library supports every dtype.
        self._begun = [*map(readers.start_gather, (part.contiguous().view(torch.uint8) for part in parts))]

    def finish(self) -> Pair:
        """Wait for the other ranks' rows, and return inputs and targets; for an SAE, both are the same tensor."""
        if not self._begun:
            return self._own
        for _, transfers in self._begun:
            self._readers.finish(transfers)
        whole = [
            gathered.flatten(0, 1).view(part.dtype)[: self._n_rows]
            for (gathered, _), part in zip(self._begun, self._own, strict=False)
        ]
        return whole[0], whole[-1]
