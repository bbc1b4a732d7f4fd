"""Base class for SAEs with a sparsity loss whose weight is adjusted to keep k latents per token active."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.contract.planning.activation_memory import START_ROWS, START_VALUES
from trainer.contract.settings.architectures import GatedSettings, JumpReLUSettings, StandardSettings
from trainer.parallel.group import sum_of
from trainer.saes.base import Sae, SaeSpec, Traits
from trainer.saes.kernels.top_k_across_ranks import nth_largest


class Steering(NamedTuple):
    """Settings for the controller that finds a penalty's weight.

    `start` is the initial weight as a fraction of the data's variance. `gain` and `integral_gain` are the proportional
    and integral gains: the change in the weight, in multiples of the initial weight, per unit by which log L0 deviates
    from its target. The integral term accumulates at every step. `lowest` is the weight's lower bound, in multiples of
    the initial weight.

    The ratio of L0 to its target is clamped to [1 / `most`, `most`]. In the first steps, the true ratio exceeds this
    range; without clamping, the FVU of gated SAEs rose from 0.6 back to 0.9.
    """

    start: float
    gain: float
    integral_gain: float
    lowest: float = 0.0
    most: float = 1.5


class Penalty(nn.Module):
    """The weight λ of a sparsity loss: fixed, or found by a proportional-integral controller that keeps L0 at k.

    λ grows from 0 during the first `warmup_fraction` of the run. λ is relative to the squared error of data normalised
    to a variance of 1 per dimension, like the coefficients of Anthropic and SAELens.
    """

    unit: Tensor
    integral: Tensor
    deviation: Tensor
    factor: Tensor

    def __init__(self, k: int, coefficient: float | str, warmup_fraction: float, steering: Steering) -> None:
        super().__init__()
        self._k, self._steering = k, steering
        self._fixed = None if isinstance(coefficient, str) else coefficient
        self._warmup_fraction = warmup_fraction
        # The warm-up factor, multiplied by λ if λ is fixed. `factor` is a copy on the device, since a CUDA graph would
        # always use the Python number from capture time.
        self._factor = 1.0 if self._fixed is None else self._fixed
        self.register_buffer("factor", torch.full((), self._factor), persistent=False)
        self.register_buffer("unit", torch.zeros(()))
        self.register_buffer("integral", torch.zeros(()))
        self.register_buffer("deviation", torch.zeros(()))

    def start(self, variance: Tensor) -> None:
        """Set the steered weight's initial value; `variance` (0-dim) is the data's total variance per token."""
        self.unit.copy_(self._steering.start * variance)

    def begin_step(self, progress: float) -> None:
        warmth = min(1.0, progress / self._warmup_fraction) if self._warmup_fraction else 1.0
        factor = warmth if self._fixed is None else self._fixed * warmth
        # Queue an update only if the factor has changed; after the warm-up, it is constant.
        if factor != self._factor:
            self._factor = factor
            self.factor.fill_(factor)

    @property
    def weight(self) -> Tensor:
        """The current λ, 0-dim."""
        if self._fixed is not None:
            return self.factor
        share = 1 + self.integral + self._steering.gain * self.deviation
        return self.factor * self.unit * share.clamp_min(self._steering.lowest)

    @torch.no_grad()
    def steer(self, n_active: Tensor, n_tokens: Tensor) -> None:
        """Update the controller with a step's total number of activations; a skipped step (0 tokens) has no effect."""
        came, ratio = n_tokens > 0, n_active / (self._k * n_tokens.clamp_min(1))
        deviation = ratio.clamp(1 / self._steering.most, self._steering.most).log()
        torch.where(came, deviation, self.deviation, out=self.deviation)
        self.integral += self._steering.integral_gain * deviation * came
        # Keep the integral from falling further once the weight has reached its lower bound.
        self.integral.clamp_min_(self._steering.lowest - 1)


class Penalised(Sae):
    """An SAE that minimises the squared error plus λ times a sparsity loss, the second of `traits.losses`."""

    settings: StandardSettings | GatedSettings | JumpReLUSettings
    steering: Steering
    traits = Traits(encodes_above=True)

    def __init__(self, spec: SaeSpec) -> None:
        super().__init__(spec)
        settings, self._k = self.settings, min(self.settings.k, self.d_sae)
        warmup = settings.sparsity_warmup_fraction
        self.penalty = Penalty(self._k, settings.sparsity_coefficient, warmup, self.steering)

    def begin_step(self, progress: float) -> Hashable:
        self.penalty.begin_step(progress)
        return super().begin_step(progress)

    def objective(self, losses: dict[str, Tensor]) -> Tensor:
        """Return the errors plus λ · sparsity, both divided by the data's variance.

        The same learning rate and gradient clipping then suit data of any scale.
        """
        sparsity = self.traits.losses[1]
        errors = sum((loss for name, loss in losses.items() if name != sparsity), losses["mse"].new_zeros(()))
        return (errors + self.penalty.weight * losses[sparsity]) / self.y_variance

    def _steer(self, n_tokens: Tensor) -> None:
        n_active = sum_of(self.step_sums[: self.n_own].sum(), self.latents.group)
        self.penalty.steer(n_active, n_tokens)

    @torch.no_grad()
    def calibrate(self, x: Tensor) -> None:
        """Set the biases so that k latents per token are active.

        Otherwise, half of all latents would be active initially, and reducing that number to k would take most of a
        short run.
        """
        self.penalty.start(self.y_variance)
        # For a latent active on 1 % of the tokens, 2,048 rows determine the bound to within 1 %.
        rows = x[:START_ROWS] - self.input_bias
        at_once = rows.split(max(1, START_VALUES // self.W_enc.shape[1]))
        pre_acts = (torch.addmm(self.b_enc, some, self.W_enc) for some in at_once)
        self._raise_bar(nth_largest(pre_acts, self._k * len(rows), self.latents.group))

    def _raise_bar(self, bound: Tensor) -> None:
        """Shift biases and thresholds so that exactly the pre-activations above `bound` (0-dim) become active."""
        self.b_enc.sub_(bound)
