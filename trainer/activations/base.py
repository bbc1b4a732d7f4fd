"""The interface of a source of activations: rows by number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]


class Source(ABC):
    """Stored activations; `place` is how to call them in a message and `meta` what is known of their origin.

    Where there is a `d_out`, every row has a target of that width beside it and a transcoder is trained.
    """

    d_in: int
    d_out: int | None = None
    n_tokens: int
    place: str
    meta: dict[str, Any]

    @abstractmethod
    def rows(self, indices: Indices) -> Tensor:
        """Return these rows [n, d_in] as stored, in ascending order of their number: a batch has no order to keep."""

    def pairs(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs [n, d_in] and their targets [n, d_out] as `rows` gives them: the same tensor for an SAE."""
        x = self.rows(indices)
        return x, x

    @abstractmethod
    def name_of(self, index: int) -> str:
        """Name a row for a message."""

    def first_not_finite(self, indices: Indices) -> int | None:
        """Return the lowest of these rows that holds a NaN or an infinity, or None; read them all again for it."""
        bad = ~torch.cat([part.isfinite().all(dim=1, keepdim=True) for part in self.pairs(indices)], dim=1).all(dim=1)
        return int(np.sort(indices)[int(bad.int().argmax())]) if bad.any() else None
