"""Leaves out rows that an SAE should not learn from, and counts them.

The rows to leave out are non-finite rows, rows with a far larger norm than most rows (such as the first tokens of
texts) and optionally zero rows, which come from padding. If one row in 256 has 170 times the usual norm, it contributes
more to an SAE's loss than the other 255 rows combined. A single NaN makes the total loss NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.activations.base import Pair, norms_of

# The limit if `data.max_norm` is 0, as a multiple of the median norm. The optimizer computes fourth powers, which would
# overflow fp32 for larger rows.
_BEYOND_FP32 = 1e9
_LARGEST = torch.finfo(torch.float32).max


class LeftOut(NamedTuple):
    """The number of rows left out for each reason, among `n_seen` rows."""

    outliers: int
    not_finite: int
    zero: int
    n_seen: int

    @classmethod
    def of(cls, counts: Tensor) -> LeftOut:
        """Create a `LeftOut` from `Outliers.counts` or from the sum of these counts over ranks."""
        return cls(*map(int, counts.tolist()))


class Outliers:
    """Finds rows to leave out, using limits computed from a sample of inputs x [n, d_in] and targets y [n, d_out].

    For an SAE, y is x. A row is an outlier if its norm is more than `times` times the median norm of non-zero rows; if
    `times` is 0, the factor is `_BEYOND_FP32`. Rows that are not finite in fp32 are also left out, as are zero rows if
    `drops_zero` is true. A row and its target are always left out together, as are all parts of a crosscoder's row;
    `parts` contains their widths.
    """

    def __init__(
        self, x: Tensor, y: Tensor, times: float, *, drops_zero: bool = False, parts: Sequence[int] = ()
    ) -> None:
        self._drops_zero, self._parts = drops_zero, tuple(parts)
        self.medians = [_median_norm(rows) for rows in self._judged(x, y)]
        self._limits = [min((times or _BEYOND_FP32) * median or _LARGEST, _LARGEST) for median in self.medians]
        self._n_seen, self._n_marked = 0, torch.zeros(2 + drops_zero, dtype=torch.int64, device=x.device)

    def of_part(self, number: int) -> Outliers:
        """Return a detector for the inputs of one part of joined rows, with the same limit."""
        part = copy.copy(self)
        part._parts, part.medians, part._limits = (), [self.medians[number]], [self._limits[number]]
        return part

    @property
    def counts(self) -> Tensor:
        """The fields of `LeftOut`, float64 [4], for all rows passed to `note` and `replace`."""
        # Create the tensor on the device, because a copy from the host would synchronise.
        n_seen = self._n_marked.new_full((), self._n_seen)
        n_within, n_finite, *n_not_zero = self._n_marked
        n_zero = n_seen - n_not_zero[0] if n_not_zero else torch.zeros_like(n_seen)
        return torch.stack([n_finite - n_within, n_seen - n_finite, n_zero, n_seen]).double()

    def ordinary(self, x: Tensor, y: Tensor) -> Tensor:
        """Return a mask [n] of the rows to keep."""
        return self._stay(self._marks(x, y))

    def replace(self, x: Tensor, y: Tensor) -> Pair:
        """Replace each row to leave out with the last kept row before it (cyclically), and count the replaced rows.

        The batch size stays the same, so the host need not wait for the GPU. `note` counts the total number of rows.
        """
        marks = self._marks(x, y)
        self._n_marked += torch.stack(marks).sum(1)
        stay = self._stay(marks)
        if not x.is_cuda and bool(stay.all()):
            return x, y
        own = torch.arange(len(x), device=x.device).masked_fill(~stay, -1)
        before = own.cummax(0).values
        rows = torch.where(before < 0, before[-1].clamp(min=0), before)
        replaced = x.index_select(0, rows)
        return replaced, replaced if y is x else y.index_select(0, rows)

    def note(self, n_rows: int) -> None:
        """Count the rows passed to `replace`; this is a separate method because a CUDA graph replays no host code."""
        self._n_seen += n_rows

    def leave_out(self, x: Tensor, y: Tensor) -> Pair:
        """Return only the rows to keep."""
        stay = self.ordinary(x, y)
        if stay.all():
            return x, y
        kept = x[stay]
        return kept, kept if y is x else y[stay]

    def count(self, x: Tensor, y: Tensor) -> LeftOut:
        """Count the rows to leave out."""
        n_within, n_finite, *n_not_zero = (int(mark.sum()) for mark in self._marks(x, y))
        n_zero = len(x) - n_not_zero[0] if n_not_zero else 0
        return LeftOut(n_finite - n_within, len(x) - n_finite, n_zero, len(x))

    def _marks(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return masks [n] of the rows within the limit, the finite rows and, with `drops_zero`, the non-zero rows."""
        marks, *others = map(self._marks_of, self._judged(x, y), self._limits)
        for other in others:
            marks = [one & of_other for one, of_other in zip(marks, other, strict=True)]
        return marks

    def _judged(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Return the rows that are judged by their norms: inputs and targets, or the parts of joined rows."""
        if self._parts:
            targets = () if y is x else y.tensor_split(len(self._parts), dim=1)
            return [*x.split(self._parts, dim=1), *targets]
        return [x] if y is x else [x, y]

    def _marks_of(self, rows: Tensor, limit: float) -> list[Tensor]:
        norms = norms_of(rows)
        # For NaN, both comparisons are false, and `norms != 0` is true.
        within_and_finite = [norms <= limit, norms < torch.inf]
        return [*within_and_finite, norms != 0] if self._drops_zero else within_and_finite

    def _stay(self, marks: list[Tensor]) -> Tensor:
        return marks[0] & marks[2] if self._drops_zero else marks[0]


def _median_norm(rows: Tensor) -> float:
    norms = norms_of(rows)
    lengths = norms[norms > 0]
    return float(lengths.median()) if len(lengths) else 0.0
