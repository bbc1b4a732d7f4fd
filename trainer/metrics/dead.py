"""The metric for dead latents."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.metrics.base import Metric, Observation
from trainer.parallel.latents import Latents


class DeadFraction(Metric):
    """The fraction of latents that are dead at the end of the interval.

    Ranks with the same latents agree on which latents are dead, so summing over these ranks does not change the
    fraction.
    """

    is_of_last = True

    def of_batch(self, seen: Observation) -> tuple[Tensor, ...]:
        return (seen.dead,)

    def whole(self, sums: Tensor, latents: Latents) -> Tensor:
        return super().whole(torch.stack([sums.sum(), sums.new_full((), len(sums))]), latents)

    def value(self, sums: Tensor) -> float:
        dead, latents = sums.tolist()
        return float(dead / latents)
