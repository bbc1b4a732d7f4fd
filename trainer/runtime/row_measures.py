"""Measures gradient row norms while the gradient is being summed, so that the update does not read the gradient twice.

Reading a gradient [65,536, 2,304] takes 0.16 ms on an H200 at 4.3 TB/s; also reading the weights takes 0.31 ms.
"""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class RowMeasures:
    """Measurements of the gradient of a matrix whose rows are the weights of n latents.

    `squares`, fp32 [n], are the squared norms of the gradient's rows. If the weights have unit norm, `dots`, fp32 [n],
    are the dot products of gradients and weights, and `squares` measure only the component orthogonal to the weights.

    The measurements are valid only for the measured tensor. An addition to the gradient, for example by a second
    micro-batch, increments torch's version counter and invalidates the measurements. Data from other ranks does not
    increment the counter, so gradients that ranks exchange must not be measured.
    """

    def __init__(self, squares: Tensor, dots: Tensor | None) -> None:
        self.squares, self.dots = squares, dots
        self._storage: StorageWeakRef | None = None
        self._version = 0
        self._unsure: list[Tensor] = []

    def note(self, gradient: Tensor, unsure: Tensor | None) -> None:
        """Record that a gradient was measured, except for the rows in `unsure` [m], which may contain duplicates."""
        # With a strong reference, torch would copy the gradient instead of taking over its memory.
        self._storage, self._version = StorageWeakRef(gradient.untyped_storage()), gradient._version
        self._unsure = [] if unsure is None else [unsure]

    def note_rows(self, gradient: Tensor, rows: Tensor) -> None:
        """Record that an operation has just added to the given rows [m] of a gradient; indices of −1 are ignored."""
        self._version += 1
        if self._are_of(gradient):
            self._unsure.append(rows)

    def take(self, gradient: Tensor) -> list[Tensor] | None:
        """Return lists of a gradient's rows that still need to be measured, or None if all of them do."""
        unsure = self._unsure if self._are_of(gradient) else None
        self._storage = None
        return unsure

    def _are_of(self, gradient: Tensor) -> bool:
        same = self._storage is not None and self._storage == StorageWeakRef(gradient.untyped_storage())
        return same and self._version == gradient._version


def keep(weights: Tensor, measures: RowMeasures) -> None:
    """Request that the rows of a matrix's gradient be measured while the gradient is being summed."""
    weights.row_measures = measures  # type: ignore[attr-defined]


def of(weights: Tensor) -> RowMeasures | None:
    """Return the measurements of a matrix's gradient, or None if none were requested."""
    return getattr(weights, "row_measures", None)
