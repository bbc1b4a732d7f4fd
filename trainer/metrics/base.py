"""The metric interface.

Metrics are computed from sums: if ranks have different numbers of tokens, a ratio of sums is exact, but a mean of
per-rank ratios is not.
"""

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

    `y` (the target) and `x_hat`, both [n_tokens, d_out], cover this rank's tokens. `acts` and `dead` (bool [d_sae])
    cover this rank's latents, and `acts` covers the tokens from all ranks that share latents. `y_mean` [d_out] is fixed
    for the run. Values that the forward pass has already computed are passed in: `mse` is Σ‖y − x_hat‖², `counts` is
    the number of tokens on which each latent is active, float [d_sae], and `sums` contains the sums over errors and
    targets. Values that several metrics need are cached properties.
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
        """The number of tokens, 0-dim; created on the device, because a copy from the host would synchronise."""
        return self.y.new_full((), len(self.y))

    @cached_property
    def centred(self) -> Moments:
        """The moments of y − y_mean; without centring, a mean far larger than the spread would cost fp32 precision."""
        if self.sums and self.sums.centred:
            return self.sums.centred
        values = self.y - self.y_mean
        return Moments(sum_of_squares(values), values.sum(dim=0))

    @cached_property
    def error(self) -> Moments:
        """The moments of x_hat − y."""
        return self.sums.error if self.sums else Moments(self.mse, (self.x_hat - self.y).sum(dim=0))

    @cached_property
    def fired(self) -> Tensor:
        """The number of tokens on which each latent is active, float [d_sae]."""
        return self.acts.count_by_latent(self.acts.values > 0) if self.counts is None else self.counts

    @cached_property
    def total_activation(self) -> Tensor:
        """The sum of all activations, 0-dim."""
        return self.acts.values.sum()


class Metric(ABC):
    """A quantity logged for each interval, computed from sums over all ranks and over either all batches or the last.

    `of_batch` must not read device values on the host, because that would stall the step.
    """

    # Whether only the last batch in the interval is used.
    is_of_last = False

    @abstractmethod
    def of_batch(self, seen: Observation) -> tuple[Tensor, ...]:
        """Return the sums for one batch, as 0-dim tensors and vectors.

        The other methods receive the concatenation of these sums as `sums`.
        """

    def whole(self, sums: Tensor, latents: Latents) -> Tensor:
        """Combine the sums, float64 [n], from ranks that share latents, so that they cover all latents and tokens."""
        return sum_of(sums, latents.group)

    @abstractmethod
    def value(self, sums: Tensor) -> float:
        """Return the metric's value, given the sums [n] over all ranks."""


def per_token(total: float, n_tokens: float) -> float:
    """Return the mean, or NaN if all batches were left out, since a mean of 0 would be mistaken for a measurement."""
    return total / n_tokens if n_tokens else math.nan
