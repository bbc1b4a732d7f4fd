"""The interface of a metric. It carries sums: a ratio of sums is exact on uneven ranks, a mean of ratios is not."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from trainer.parallel.group import sum_of
from trainer.parallel.latents import Latents
from trainer.saes.losses import Moments, Sums, sum_of_squares
from trainer.saes.sparse_acts import Acts


@dataclass(frozen=True)
class Observation:
    """One micro-batch after its forward pass, in the SAE's normalised units.

    Target `y` and `x_hat` [n_tokens, d_out] of this rank's tokens; `acts` and `dead` (bool [d_sae]) of its latents,
    `acts` on the tokens of all ranks that share latents; `y_mean` [d_out], fixed for the run. What the pass knows
    already is handed over: `mse`, Σ‖y − x_hat‖²; `counts`, on how many tokens each latent is active, float [d_sae]; and
    `sums` of errors and targets. What several metrics use is computed once.
    """

    y: Tensor
    x_hat: Tensor
    acts: Acts
    dead: Tensor
    y_mean: Tensor
    mse: Tensor
    counts: Tensor | None = None
    sums: Sums | None = None

    @cached_property
    def n_tokens(self) -> Tensor:
        """The number of tokens, 0-dim; filled on the device, since a copy from the host would make it wait."""
        return self.y.new_full((), len(self.y))

    @cached_property
    def centred(self) -> Moments:
        """y − y_mean: sums are taken about 0, since a mean far larger than the spread would cost fp32 its digits."""
        if self.sums and self.sums.centred:
            return self.sums.centred
        values = self.y - self.y_mean
        return Moments(sum_of_squares(values), values.sum(dim=0))

    @cached_property
    def error(self) -> Moments:
        """x_hat − y."""
        return self.sums.error if self.sums else Moments(self.mse, (self.x_hat - self.y).sum(dim=0))

    @cached_property
    def fired(self) -> Tensor:
        """On how many tokens each latent is active, float [d_sae]."""
        return self.acts.count_by_latent(self.acts.values > 0) if self.counts is None else self.counts

    @cached_property
    def total_activation(self) -> Tensor:
        """The sum of all activations, 0-dim."""
        return self.acts.values.sum()


class Metric(ABC):
    """A quantity over a log interval: what its batches add up to on all ranks, or what the last of them had.

    `of_batch` stays on the device: asking it for a number would make the step wait.
    """

    # Whether only the last batch counts.
    is_of_last = False

    @abstractmethod
    def of_batch(self, seen: Observation) -> tuple[Tensor, ...]:
        """Return the sums of one batch, numbers (0-dim) and vectors; laid end to end they are the `sums` below."""

    def whole(self, sums: Tensor, latents: Latents) -> Tensor:
        """Make of this rank's sums, float64 [n], those of all latents, over the tokens of all ranks that share them."""
        return sum_of(sums, latents.group)

    @abstractmethod
    def value(self, sums: Tensor) -> float:
        """Return the quantity from sums [n] that were added over all ranks."""


def per_token(total: float, n_tokens: float) -> float:
    """Return a mean; NaN where every batch was left out, so that 0 is not taken for a result."""
    return total / n_tokens if n_tokens else math.nan
