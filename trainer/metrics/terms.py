"""The loss and its terms, and whether the data is finite."""

from __future__ import annotations

from torch import Tensor

from trainer.metrics.base import stack


class TermSums:
    """Named sums over tokens, as means per token once added over ranks."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._total: Tensor | None = None

    def update(self, terms: dict[str, Tensor], n_tokens: int) -> None:
        first = terms[self._names[0]]
        batch = stack(*(terms[name].detach() for name in self._names), n_tokens, like=first)
        self._total = batch if self._total is None else self._total + batch

    def sums(self) -> Tensor:
        """The sums since the last call and the tokens they cover, float64 [n + 1]."""
        total, self._total = self._total, None
        assert total is not None, "a log interval has at least one batch"
        return total

    def means(self, sums: Tensor) -> dict[str, float]:
        *totals, n_tokens = sums.tolist()
        return {name: total / n_tokens for name, total in zip(self._names, totals, strict=True)}
