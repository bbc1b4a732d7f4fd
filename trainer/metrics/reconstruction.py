"""How well x_hat matches x."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.metrics.base import Observation, SummingMetric, stack


class Fvu(SummingMetric):
    """Σ‖x − x_hat‖² / Σ‖x − mean of x‖² over the interval.

    Moments are taken about the run's `x_mean`: about 0, a mean far larger than the spread would cost fp32 its digits.
    """

    def of_batch(self, seen: Observation) -> Tensor:
        centred = seen.x - seen.x_mean
        error = (seen.x - seen.x_hat).square().sum()
        scalars = stack(error, centred.square().sum(), len(centred), like=centred)
        return torch.cat([scalars, centred.sum(dim=0)])

    def value(self, sums: Tensor) -> float:
        error, second_moment, n_tokens = sums[:3].tolist()
        variance = second_moment - float(sums[3:].square().sum()) / n_tokens
        return float(error / max(variance, 1e-12))
