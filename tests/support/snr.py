"""A metric that the registry does not have, as somebody who adds one would write it."""

from __future__ import annotations

import math

from torch import Tensor

from trainer.metrics.base import Observation, SummingMetric, stack


class Snr(SummingMetric):
    """Signal-to-noise ratio of the reconstruction, in decibels: 10 log10(Σ‖y − mean of y‖² / Σ‖y − x_hat‖²)."""

    def of_batch(self, seen: Observation) -> Tensor:
        return stack(seen.centred.square, seen.error.square, like=seen.y)

    def value(self, sums: Tensor) -> float:
        signal, noise = sums.tolist()
        return 10 * math.log10(signal / max(noise, 1e-12))
