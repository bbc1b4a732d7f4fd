"""Lengths of a gradient's rows, measured by whoever sums it up, so that the update need not read it once more.

Of a gradient [65,536, 2,304] a pass takes 0.16 ms of an H200 at 4.3 TB/s, and 0.31 with the weights.
"""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class RowMeasures:
    """Measures of the gradient of a matrix of n latents, whose weights are its rows.

    `squares` are squared lengths, fp32 [n]. Where weights are held at length 1, `dots` are the products of gradients
    with them, fp32 [n], and the squares those of what lies across.

    They are of the very tensor that was measured. Whatever else is added to a gradient, by a second micro-batch, say,
    is counted by torch, and the measures are void. What other ranks send is not: such gradients are not to be measured.
    """

    def __init__(self, squares: Tensor, dots: Tensor | None) -> None:
        self.squares, self.dots = squares, dots
        self._storage: StorageWeakRef | None = None
        self._version = 0
        self._unsure: list[Tensor] = []

    def note(self, gradient: Tensor, unsure: Tensor | None) -> None:
        """Note that a gradient was measured but for the rows `unsure` [m], of which some may be named twice."""
        # A strong reference would have torch copy the gradient, where it takes over one that nobody else has.
        self._storage, self._version = StorageWeakRef(gradient.untyped_storage()), gradient._version
        self._unsure = [] if unsure is None else [unsure]

    def note_rows(self, gradient: Tensor, rows: Tensor) -> None:
        """Note that something was just added, once, to some rows [m] of a gradient; −1 stands for none."""
        self._version += 1
        if self._are_of(gradient):
            self._unsure.append(rows)

    def take(self, gradient: Tensor) -> list[Tensor] | None:
        """Return the rows of a gradient that are still to be measured; None: all."""
        unsure = self._unsure if self._are_of(gradient) else None
        self._storage = None
        return unsure

    def _are_of(self, gradient: Tensor) -> bool:
        same = self._storage is not None and self._storage == StorageWeakRef(gradient.untyped_storage())
        return same and self._version == gradient._version


def keep(weights: Tensor, measures: RowMeasures) -> None:
    """Let whoever sums up the gradient of a matrix measure its rows."""
    weights.row_measures = measures  # type: ignore[attr-defined]


def of(weights: Tensor) -> RowMeasures | None:
    """Return where the measures of a matrix's gradient go, if anywhere."""
    return getattr(weights, "row_measures", None)
