"""The interface of a metric. It carries sums: a ratio of sums is exact on uneven ranks, a mean of ratios is not."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.parallel.group import sum_of
from trainer.parallel.latents import Latents
from trainer.saes.losses import sum_of_squares
from trainer.saes.sparse_acts import Acts


@dataclass(frozen=True)
class Observation:
    """One micro-batch after its forward pass, in the SAE's normalised units.

    Target `y` and `x_hat` [n_tokens, d_out] of this rank's tokens; `acts` and `dead` (bool [d_sae]) of its latents,
    `acts` on the tokens of all ranks that share latents; `y_mean` [d_out], fixed for the run. What several metrics use
    is computed once.
    """

    y: Tensor
    x_hat: Tensor
    acts: Acts
    dead: Tensor
    y_mean: Tensor

    @cached_property
    def centred(self) -> Moments:
        """y − y_mean: sums are taken about 0, since a mean far larger than the spread would cost fp32 its digits."""
        return Moments.of(self.y - self.y_mean)

    @cached_property
    def error(self) -> Moments:
        """y − x_hat."""
        return Moments.of(self.y - self.x_hat)

    @cached_property
    def fired(self) -> Tensor:
        """On how many tokens each latent is active, float [d_sae]."""
        return self.acts.count_by_latent(self.acts.values > 0)

    @cached_property
    def total_activation(self) -> Tensor:
        """The sum of all activations, 0-dim."""
        return self.acts.values.sum()


class Moments(NamedTuple):
    """Σ‖v‖², 0-dim, and Σv [d] over tokens."""

    square: Tensor
    total: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        return cls(sum_of_squares(values), values.sum(dim=0))


class Metric(ABC):
    """A quantity over a log interval: `update` per batch, then `value` of the `sums` added over ranks.

    `update` and `sums` stay on the device: asking it for a number would make the step wait.
    """

    @abstractmethod
    def update(self, seen: Observation) -> None:
        """Add a batch."""

    @abstractmethod
    def sums(self) -> Tensor:
        """Return what was summed since the last call, float64 [n], and start anew."""

    def whole(self, sums: Tensor, latents: Latents) -> Tensor:
        """Make of this rank's sums those of all latents, over the tokens of all ranks that share them."""
        return sum_of(sums, latents.group)

    @abstractmethod
    def value(self, sums: Tensor) -> float:
        """Return the quantity from sums [n] that were added over all ranks."""


class SummingMetric(Metric):
    """A metric whose update adds a vector of sums."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    @abstractmethod
    def of_batch(self, seen: Observation) -> Tensor:
        """Return the sums [n] of one batch."""

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
    """Return a mean; NaN where every batch was left out, so that 0 is not taken for a result."""
    return total / n_tokens if n_tokens else math.nan


def stack(*values: Tensor | float, like: Tensor) -> Tensor:
    """Stack scalars, on the device or not, into one float64 vector on the device of `like`.

    `new_full` fills on the device, where `new_tensor` would copy from the host and make it wait.
    """
    filled = [v if isinstance(v, Tensor) else like.new_full((), v, dtype=torch.float64) for v in values]
    return torch.stack([value.double() for value in filled])
