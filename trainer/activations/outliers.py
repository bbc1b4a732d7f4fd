"""Rows whose norm is far beyond all others, such as those of a text's first tokens: left out, and counted.

One row of 170 times the norm in 256 takes more of an SAE's loss than all others together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.activations.base import Pair


class Outliers:
    """Finds rows whose norm is more than `times` the median norm of a sample, x [n, d_in] and targets y [n, d_out].

    With `times` = 0, or where half of the sample is zero, no row is an outlier.
    """

    def __init__(self, x: Tensor, y: Tensor, times: float) -> None:
        self.times = times
        of_parts = [x] if y is x else [x, y]
        self.medians = [float(torch.linalg.vector_norm(part.float(), dim=1).median()) for part in of_parts]
        self._limits = [times * median or float("inf") for median in self.medians]
        self._n_seen, self._n_found = 0, torch.zeros((), dtype=torch.int64, device=x.device)

    @property
    def counts(self) -> Tensor:
        """How many rows `replace` has replaced and how many were noted: float64 [2]."""
        # Filled on the device, since a copy from the host would wait.
        return torch.stack([self._n_found, self._n_found.new_full((), self._n_seen)]).double()

    def among(self, x: Tensor, y: Tensor) -> Tensor:
        """Tell for each row, bool [n], whether it or its target is an outlier; one that is not finite is none."""
        outliers = self._beyond(x, self._limits[0])
        return outliers if y is x else outliers | self._beyond(y, self._limits[1])

    def replace(self, x: Tensor, y: Tensor) -> Pair:
        """Return the rows with each outlier replaced by the row before it that is none, in a ring; count outliers.

        So batches keep their size, and nothing waits for a GPU. The host is told of the rows by `note`.
        """
        if not self.times:
            return x, y
        outliers = self.among(x, y)
        self._n_found += outliers.sum()
        own = torch.arange(len(x), device=x.device).masked_fill(outliers, -1)
        before = own.cummax(0).values
        rows = torch.where(before < 0, before[-1].clamp(min=0), before)
        replaced = x.index_select(0, rows)
        return replaced, replaced if y is x else y.index_select(0, rows)

    def note(self, n_rows: int) -> None:
        """Count rows that `replace` looks at: apart from it, since a GPU repeats recorded steps without the host."""
        self._n_seen += n_rows if self.times else 0

    def leave_out(self, x: Tensor, y: Tensor) -> Pair:
        """Return the rows without the outliers."""
        if not self.times:
            return x, y
        stay = ~self.among(x, y)
        kept = x[stay]
        return kept, kept if y is x else y[stay]

    @staticmethod
    def _beyond(rows: Tensor, limit: float) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
        return (norms > limit) & (norms < torch.inf)
