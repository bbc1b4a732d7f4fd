"""Reconstruction metrics."""

from __future__ import annotations

from torch import Tensor

from trainer.metrics.base import Metric, Observation, per_token


class Fvu(Metric):
    """The fraction of variance unexplained, Σ‖y − x_hat‖² / Σ‖y − mean(y)‖² over the interval."""

    def of_batch(self, seen: Observation) -> tuple[Tensor, ...]:
        return seen.error.square, seen.centred.square, seen.n_tokens, seen.centred.total

    def value(self, sums: Tensor) -> float:
        error, second_moment, n_tokens = sums[:3].tolist()
        variance = second_moment - per_token(float(sums[3:].square().sum()), n_tokens)
        return float(error / max(variance, 1e-12))


class ExplainedVariance(Metric):
    """1 − Σ Var(y − x_hat) / Σ Var(y), with variances over tokens; unlike 1 − FVU, it ignores a constant error."""

    def of_batch(self, seen: Observation) -> tuple[Tensor, ...]:
        return seen.centred.square, seen.error.square, seen.n_tokens, seen.centred.total, seen.error.total

    def value(self, sums: Tensor) -> float:
        second_moment, squared_error, n_tokens = sums[:3].tolist()
        offset, mean_error = sums[3:].chunk(2)
        variance = second_moment - per_token(float(offset.square().sum()), n_tokens)
        unexplained = squared_error - per_token(float(mean_error.square().sum()), n_tokens)
        return float(1 - unexplained / max(variance, 1e-12))
