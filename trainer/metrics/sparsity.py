"""How many latents are active."""

from __future__ import annotations

from torch import Tensor

from trainer.metrics.base import Observation, SummingMetric, stack


class L0(SummingMetric):
    """Latents with a positive activation per token."""

    def of_batch(self, seen: Observation) -> Tensor:
        return stack((seen.acts > 0).sum(), len(seen.acts), like=seen.acts)

    def value(self, sums: Tensor) -> float:
        active, n_tokens = sums.tolist()
        return float(active / n_tokens)
