"""Everything about one SAE that is summed between two log rows."""

from __future__ import annotations

from torch import Tensor

from trainer.contract.settings import catalog
from trainer.metrics.base import Metric, Observation
from trainer.metrics.terms import TermSums
from trainer.parallel.group import summed
from trainer.parallel.latents import Latents


class Interval:
    """The metrics of the registry and the loss terms."""

    def __init__(self, term_names: tuple[str, ...]) -> None:
        self._metrics: dict[str, Metric] = {name: entry.load()() for name, entry in catalog.METRICS.items()}
        self._terms = TermSums(term_names)

    def observe(self, seen: Observation, terms: dict[str, Tensor]) -> None:
        """Adds a micro-batch; never waits for the device."""
        for metric in self._metrics.values():
            metric.update(seen)
        self._terms.update(terms, len(seen.y))

    def sums(self, latents: Latents) -> dict[str, Tensor]:
        """What is to be added over the ranks with the same latents; starts anew."""
        found = {name: metric.whole(metric.sums(), latents) for name, metric in self._metrics.items()}
        return found | {"terms": summed(self._terms.sums(), latents.group)}

    def values(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Metrics and mean loss terms by name, from sums added over ranks."""
        found = {name: metric.value(totals[name]) for name, metric in self._metrics.items()}
        return self._terms.means(totals["terms"]) | found
