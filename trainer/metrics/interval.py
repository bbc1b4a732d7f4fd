"""Everything about one SAE that is summed between two log rows."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.contract.settings import catalog
from trainer.metrics.base import Metric, Observation, per_token, stack
from trainer.parallel.group import sum_of
from trainer.parallel.latents import Latents


class TermSums:
    """Named sums over tokens, which become means per token once added over ranks."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._total: Tensor | None = None

    def update(self, terms: dict[str, Tensor], n_tokens: int) -> None:
        first = terms[self._names[0]]
        batch = stack(*(terms[name].detach() for name in self._names), n_tokens, like=first)
        batch = torch.where(batch.isfinite().all(), batch, 0)
        self._total = batch if self._total is None else self._total + batch

    def sums(self) -> Tensor:
        """Return the sums since the last call and the tokens they cover, float64 [n + 1], and start anew."""
        total, self._total = self._total, None
        assert total is not None, "a log interval has at least one batch"
        return total

    def means(self, sums: Tensor) -> dict[str, float]:
        *totals, n_tokens = sums.tolist()
        return {name: per_token(total, n_tokens) for name, total in zip(self._names, totals, strict=True)}


class Interval:
    """The metrics of the registry and the loss terms."""

    def __init__(self, term_names: tuple[str, ...]) -> None:
        self._metrics: dict[str, Metric] = {name: entry.load()() for name, entry in catalog.METRICS.items()}
        self._terms = TermSums(term_names)

    def observe(self, seen: Observation, terms: dict[str, Tensor]) -> None:
        """Add a micro-batch without waiting for the device."""
        for metric in self._metrics.values():
            metric.update(seen)
        self._terms.update(terms, len(seen.y))

    def sums(self, latents: Latents) -> dict[str, Tensor]:
        """Return by name the sums to add over the ranks with the same latents, and start anew."""
        metrics = {name: metric.whole(metric.sums(), latents) for name, metric in self._metrics.items()}
        return metrics | {"terms": sum_of(self._terms.sums(), latents.group)}

    def values(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Return metrics and mean loss terms by name, from sums added over ranks."""
        metrics = {name: metric.value(totals[name]) for name, metric in self._metrics.items()}
        return self._terms.means(totals["terms"]) | metrics
