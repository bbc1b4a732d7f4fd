"""How many latents are active, how strongly, and how often the same ones."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.metrics.base import Metric, Observation, SummingMetric, per_token, stack
from trainer.parallel.group import sum_of
from trainer.parallel.latents import Latents

# Anthropic and SAELens call a latent dense that fires on more than a tenth of all tokens.
DENSE = 0.1


class L0(SummingMetric):
    """Latents with a positive activation per token."""

    def of_batch(self, seen: Observation) -> Tensor:
        # The activations are there for their NaN, where a batch has one.
        return stack(seen.fired.sum() + 0 * seen.total_activation, len(seen.y), like=seen.y)

    def value(self, sums: Tensor) -> float:
        active, n_tokens = sums.tolist()
        return per_token(active, n_tokens)


class L1(SummingMetric):
    """Sum of activations per token."""

    def of_batch(self, seen: Observation) -> Tensor:
        return stack(seen.total_activation, len(seen.y), like=seen.y)

    def value(self, sums: Tensor) -> float:
        total, n_tokens = sums.tolist()
        return per_token(total, n_tokens)


class DenseLatents(Metric):
    """Share of latents that fire on more than a tenth of the interval's tokens."""

    def __init__(self) -> None:
        self._fired: Tensor | None = None
        self._n_tokens = 0

    def update(self, seen: Observation) -> None:
        self._fired = seen.fired if self._fired is None else self._fired + seen.fired
        self._n_tokens += len(seen.y)

    def sums(self) -> Tensor:
        assert self._fired is not None, "a log interval has at least one batch"
        sums = torch.cat([self._fired.double(), stack(self._n_tokens, like=self._fired)])
        self._fired, self._n_tokens = None, 0
        return sums

    def whole(self, sums: Tensor, latents: Latents) -> Tensor:
        return torch.cat([latents.whole(sums[:-1]), sum_of(sums[-1:], latents.group)])

    def value(self, sums: Tensor) -> float:
        *_, n_tokens = sums.tolist()
        return float((sums[:-1] > DENSE * n_tokens).double().mean())
