"""Accumulates the metrics and loss terms for one SAE between two log rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.contract.settings import catalog
from trainer.contract.settings.catalog import MetricEntry
from trainer.metrics.base import Metric, Observation, per_token
from trainer.parallel.group import sum_of
from trainer.parallel.latents import Latents
from trainer.runtime.triton_kernels import METRIC_SUMS


class Interval:
    """Accumulates all registered metrics, or only `entries`, and the named loss terms, averaged over tokens.

    On a GPU, an operation on a few numbers takes as long as one on many, so all sums share one vector.
    """

    def __init__(self, term_names: Sequence[str] = (), entries: Mapping[str, MetricEntry] = catalog.METRICS) -> None:
        self._metrics: dict[str, Metric] = {name: entry.load()() for name, entry in entries.items()}
        self._term_names = tuple(term_names)
        self._total: Tensor | None = None
        self._sizes: list[int] = []
        self._last: dict[str, tuple[Tensor, ...]] = {}

    @torch.no_grad()
    def observe(self, seen: Observation, terms: Mapping[str, Tensor] | None = None) -> None:
        """Add a micro-batch without waiting for the device."""
        parts = [metric.of_batch(seen) for metric in self._summed.values()]
        parts.append((*((terms or {})[name] for name in self._term_names), seen.n_tokens))
        last = {name: one.of_batch(seen) for name, one in self._metrics.items() if one.is_of_last}
        self._sizes = [sum(part.numel() for part in of_one) for of_one in parts]
        batch = torch.cat([part.reshape(-1) for of_one in parts for part in of_one])
        if self._total is None:
            self._total = batch.new_zeros(len(batch), dtype=torch.float64)
            self._last = {name: tuple(map(torch.empty_like, of)) for name, of in last.items()}
        # Update in place, so that replaying a CUDA graph updates the sums too.
        add_if_finite(self._total, batch)
        for name, of_last in last.items():
            for kept, part in zip(self._last[name], of_last, strict=True):
                kept.copy_(part)

    def sums(self, latents: Latents) -> dict[str, Tensor]:
        """Return the sums by name, float64 [n], and reset them to 0.

        The caller adds up these sums over ranks with the same latents.
        """
        assert self._total is not None, "a log interval has at least one batch"
        total = self._total.clone()
        self._total.zero_()
        *of_metrics, of_terms = total.split(self._sizes)
        last = {name: torch.cat([part.reshape(-1) for part in parts]).double() for name, parts in self._last.items()}
        sums = last | dict(zip(self._summed, of_metrics, strict=True))
        wholes = {name: metric.whole(sums[name], latents) for name, metric in self._metrics.items()}
        return wholes | {"terms": sum_of(of_terms, latents.group)}

    def lasting(self) -> list[Tensor]:
        """Return the tensors that contain the sums; these tensors are never replaced after the first batch."""
        return [*([] if self._total is None else [self._total]), *(one for of in self._last.values() for one in of)]

    def values(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics and mean loss terms by name, from sums over all ranks."""
        *of_terms, n_tokens = totals["terms"].tolist()
        means = {name: per_token(total, n_tokens) for name, total in zip(self._term_names, of_terms, strict=True)}
        return means | {name: metric.value(totals[name]) for name, metric in self._metrics.items()}

    @property
    def _summed(self) -> dict[str, Metric]:
        return {name: metric for name, metric in self._metrics.items() if not metric.is_of_last}


def add_if_finite(total: Tensor, numbers: Tensor) -> None:
    """Add numbers [n] to a float64 `total` [n] in place, unless any of them is NaN or infinite.

    Training also skips batches with NaN or infinite values.
    """
    if triton := METRIC_SUMS.on(total):
        triton.add_if_finite(total, numbers)
    else:
        # If any number is NaN or infinite, the sum times 0 is NaN, which converts to True. If all numbers are finite,
        # the product is 0, which converts to False.
        total += numbers.masked_fill((numbers.sum(dtype=torch.float64) * 0).bool(), 0)
