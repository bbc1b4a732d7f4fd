"""The loss and its terms."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.metrics.base import per_token, stack


class TermSums:
    """Named sums over tokens, as means per token once added over ranks."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._total: Tensor | None = None

    def update(self, terms: dict[str, Tensor], n_tokens: int) -> None:
        first = terms[self._names[0]]
        batch = stack(*(terms[name].detach() for name in self._names), n_tokens, like=first)
        batch = torch.where(batch.isfinite().all(), batch, 0)
        self._total = batch if self._total is None else self._total + batch

    def sums(self) -> Tensor:
        """The sums since the last call and the tokens they cover, float64 [n + 1]."""
        total, self._total = self._total, None
        assert total is not None, "a log interval has at least one batch"
        return total

    def means(self, sums: Tensor) -> dict[str, float]:
        *totals, n_tokens = sums.tolist()
        return {name: per_token(total, n_tokens) for name, total in zip(self._names, totals, strict=True)}
