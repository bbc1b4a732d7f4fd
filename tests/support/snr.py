"""An example of a new metric that is not in the registry."""

from __future__ import annotations

import math

from torch import Tensor

from trainer.metrics.base import Metric, Observation


class Snr(Metric):
    """Signal-to-noise ratio of the reconstruction, in decibels: 10 log10(Σ‖y − mean of y‖² / Σ‖y − x_hat‖²)."""

    def of_batch(self, seen: Observation) -> tuple[Tensor, ...]:
        return seen.centred.square, seen.error.square

    def value(self, sums: Tensor) -> float:
        signal, noise = sums.tolist()
        return 10 * math.log10(signal / max(noise, 1e-12))
