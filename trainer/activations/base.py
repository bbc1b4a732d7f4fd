"""What a source of activations answers: rows by number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]


class Source(ABC):
    """Stored activations; `place` is how to call them in a message and `meta` what is known of their origin."""

    d_in: int
    n_tokens: int
    place: str
    meta: dict[str, Any]

    @abstractmethod
    def rows(self, indices: Indices) -> Tensor:
        """These rows [n, d_in] as stored, in ascending order of their number: a batch has no order to keep."""

    @abstractmethod
    def name_of(self, index: int) -> str:
        """How to call a row in a message."""

    def sample(self, n_tokens: int, seed: int) -> Tensor:
        """Random rows [n, d_in] from everywhere, fp32: from one place only, b_dec would be that text's own."""
        return self.rows(self.sampled(n_tokens, seed)).float()

    def sampled(self, n_tokens: int, seed: int) -> Indices:
        """Which rows `sample` takes."""
        generator = np.random.default_rng(seed)
        return generator.choice(self.n_tokens, min(n_tokens, self.n_tokens), replace=False, shuffle=False)

    def first_not_finite(self, indices: Indices) -> int | None:
        """The lowest of these rows that holds a NaN or an infinity; reads them all again."""
        bad = ~self.rows(indices).isfinite().all(dim=1)
        return int(np.sort(indices)[int(bad.int().argmax())]) if bad.any() else None
