"""Everything that is summed between two log rows."""

from __future__ import annotations

import time

from torch import Tensor

from trainer.contract import catalog
from trainer.metrics.base import Metric, Observation
from trainer.metrics.rate import Rate
from trainer.metrics.terms import TermSums

# Work and waiting are timed separately; a rank that seems to have done nothing but wait did something all the same.
LEAST_BUSY = 0.01


class Interval:
    """The metrics of the registry, the loss terms, and this rank's own pace."""

    def __init__(self, term_names: tuple[str, ...]) -> None:
        self._metrics: dict[str, Metric] = {name: entry.load()() for name, entry in catalog.METRICS.items()}
        self._terms = TermSums(term_names)
        self._rate = Rate()
        self.begin()

    def begin(self) -> None:
        """Starts the clocks; called as the first step of an interval starts."""
        self._began, self._n_tokens = time.perf_counter(), 0
        for metric in self._metrics.values():
            metric.begin()

    def observe(self, seen: Observation, terms: dict[str, Tensor]) -> None:
        """Adds a micro-batch; never waits for the device."""
        n_tokens = len(seen.x)
        for metric in self._metrics.values():
            metric.update(seen)
        self._terms.update(terms, n_tokens)
        self._n_tokens += n_tokens

    def sums(self) -> dict[str, Tensor]:
        """What is to be added over ranks; starts anew."""
        return {name: metric.sums() for name, metric in self._metrics.items()} | {"terms": self._terms.sums()}

    def values(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Metrics and mean loss terms by name, from sums added over ranks."""
        found = {name: metric.value(totals[name]) for name, metric in self._metrics.items()}
        return self._terms.means(totals["terms"]) | found

    def pace(self, n_steps: int, waited_s: float) -> tuple[float, float]:
        """This rank's tokens per second and ms per step without waiting for others, in which a slow one shows."""
        elapsed_s = time.perf_counter() - self._began
        rate = self._rate.add(self._n_tokens, max(elapsed_s - waited_s, LEAST_BUSY * elapsed_s))
        return rate, 1000 * self._n_tokens / n_steps / rate
