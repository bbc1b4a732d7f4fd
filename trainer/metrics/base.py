"""What a metric answers. It carries sums: a ratio of sums is exact on uneven ranks, a mean of ratios is not."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.saes.acts import Acts


class Observation(NamedTuple):
    """One micro-batch after its forward pass, in the SAE's normalised units.

    Target `y` and `x_hat` [n_tokens, d_out]; `acts`; `dead` bool [d_sae]; `y_mean` [d_out], fixed for the run.
    """

    y: Tensor
    x_hat: Tensor
    acts: Acts
    dead: Tensor
    y_mean: Tensor


class Metric(ABC):
    """A quantity over a log interval: `update` per batch, then `value` of the `sums` added over ranks.

    `update` and `sums` stay on the device: asking it for a number would make the step wait.
    """

    @abstractmethod
    def update(self, seen: Observation) -> None:
        """Adds a batch."""

    @abstractmethod
    def sums(self) -> Tensor:
        """What was summed since the last call, float64 [n], and starts anew."""

    @abstractmethod
    def value(self, sums: Tensor) -> float:
        """The quantity from sums [n] added over all ranks."""


class SummingMetric(Metric):
    """A metric whose update adds a vector of sums."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    @abstractmethod
    def of_batch(self, seen: Observation) -> Tensor:
        """The sums [n] of one batch."""

    def update(self, seen: Observation) -> None:
        batch = self.of_batch(seen).double()
        # A batch with a NaN is not trained on either.
        batch = torch.where(batch.isfinite().all(), batch, 0)
        self._total = batch if self._total is None else self._total + batch

    def sums(self) -> Tensor:
        total, self._total = self._total, None
        assert total is not None, "a log interval has at least one batch"
        return total


def per_token(total: float, n_tokens: float) -> float:
    """A mean; NaN where every batch was left out, so that 0 is not taken for a result."""
    return total / n_tokens if n_tokens else math.nan


def stack(*values: Tensor | float, like: Tensor) -> Tensor:
    """Scalars, on the device or not, as one float64 vector on the device of `like`.

    `new_full` fills on the device, where `new_tensor` would copy from the host and make it wait.
    """
    filled = [v if isinstance(v, Tensor) else like.new_full((), v, dtype=torch.float64) for v in values]
    return torch.stack([value.double() for value in filled])
