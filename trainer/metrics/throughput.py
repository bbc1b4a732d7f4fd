"""How fast it goes."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from trainer.metrics.base import Metric, Observation
from trainer.metrics.rate import Rate


class TokensPerSecond(Metric):
    """Tokens of all ranks per second of training, waiting for data and for each other included."""

    def __init__(self) -> None:
        self._rate = Rate()
        self._device = torch.device("cpu")
        self.begin()

    def begin(self) -> None:
        self._since, self._n_tokens = time.perf_counter(), 0

    def update(self, seen: Observation) -> None:
        self._n_tokens += len(seen.x)
        self._device = seen.x.device

    def sums(self) -> Tensor:
        sums = [self._n_tokens, time.perf_counter() - self._since, 1]
        return torch.tensor(sums, dtype=torch.float64, device=self._device)

    def value(self, sums: Tensor) -> float:
        n_tokens, seconds, ranks = sums.tolist()
        return self._rate.add(n_tokens, seconds / ranks)
