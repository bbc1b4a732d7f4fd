"""Divides the reading of a batch among ranks with the same tokens, and puts the batch together on each of them."""

from __future__ import annotations

import numpy as np
import torch

from trainer.activations.base import Indices, Pair
from trainer.parallel.group import Group


def own_rows(indices: Indices, readers: Group) -> Indices:
    """Return the rows of a batch that this rank reads, in ascending order.

    All ranks read the same number of rows: to make the parts equal, the last row of the batch is repeated.
    """
    n_each = -(-len(indices) // readers.size)
    places = np.arange(readers.index * n_each, (readers.index + 1) * n_each)
    rows: Indices = np.sort(indices, kind="stable")[places.clip(max=len(indices) - 1)]
    return rows


class Exchange:
    """A batch of `n_rows` on its way from each reader to all others; `own` has the `own_rows` of this rank.

    All readers begin their exchanges in the same order. Without other readers nothing is sent.
    """

    def __init__(self, own: Pair, n_rows: int, readers: Group) -> None:
        self._own, self._n_rows, self._readers = own, n_rows, readers
        x, y = own
        parts = [] if readers.size == 1 else [x] if y is x else [x, y]
        # As bytes, since not every library sends every type of number.
        self._begun = [*map(readers.start_gather, (part.contiguous().view(torch.uint8) for part in parts))]

    def finish(self) -> Pair:
        """Wait for the other ranks' rows, and return inputs and targets: the same tensor for an SAE."""
        if not self._begun:
            return self._own
        for _, transfers in self._begun:
            self._readers.finish(transfers)
        whole = [
            gathered.flatten(0, 1).view(part.dtype)[: self._n_rows]
            for (gathered, _), part in zip(self._begun, self._own, strict=False)
        ]
        return whole[0], whole[-1]
