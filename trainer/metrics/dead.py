"""How much of the dictionary is unused."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.metrics.base import Metric, Observation, stack


class DeadFraction(Metric):
    """Share of latents that count as dead at the end of the interval; every rank knows the same ones."""

    def __init__(self) -> None:
        self._dead = torch.zeros(0)

    def update(self, seen: Observation) -> None:
        self._dead = seen.dead

    def sums(self) -> Tensor:
        return stack(self._dead.sum(), len(self._dead), like=self._dead)

    def value(self, sums: Tensor) -> float:
        dead, latents = sums.tolist()
        return float(dead / latents)
