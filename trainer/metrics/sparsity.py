"""Sparsity metrics: the number of active latents, their activations, and the fraction of dense latents."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.metrics.base import Metric, Observation, per_token
from trainer.parallel.group import sum_of
from trainer.parallel.latents import Latents

# Anthropic and SAELens call a latent dense if it fires on more than a tenth of all tokens.
DENSE = 0.1


class L0(Metric):
    """The mean number of active latents per token."""

    def of_batch(self, seen: Observation) -> tuple[Tensor, ...]:
        return seen.fired.sum(), seen.n_tokens

    def value(self, sums: Tensor) -> float:
        active, n_tokens = sums.tolist()
        return per_token(active, n_tokens)


class L1(Metric):
    """The mean sum of activations per token."""

    def of_batch(self, seen: Observation) -> tuple[Tensor, ...]:
        return seen.total_activation, seen.n_tokens

    def value(self, sums: Tensor) -> float:
        total, n_tokens = sums.tolist()
        return per_token(total, n_tokens)


class DenseLatents(Metric):
    """The fraction of latents that fire on more than a tenth of the interval's tokens."""

    def of_batch(self, seen: Observation) -> tuple[Tensor, ...]:
        return seen.fired, seen.n_tokens

    def whole(self, sums: Tensor, latents: Latents) -> Tensor:
        return torch.cat([latents.whole(sums[:-1]), sum_of(sums[-1:], latents.group)])

    def value(self, sums: Tensor) -> float:
        return float((sums[:-1] > DENSE * float(sums[-1])).double().mean())
