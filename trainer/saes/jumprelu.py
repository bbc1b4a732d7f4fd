"""JumpReLU SAE (Rajamanoharan et al. 2024, arXiv 2407.14435), also with Anthropic's penalty of January 2025."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.saes.base import ALL, Output
from trainer.saes.losses import squared_error
from trainer.saes.penalised import Penalised, Steering
from trainer.saes.sparse_acts import Acts


class JumpReLU(Penalised):
    """A latent is active above a `threshold` of its own ([d_sae]), which is learnt by straight-through gradients.

    A jump has no gradient; that of its mean over a window of `bandwidth` around the threshold stands in for it, so
    that only pre-activations within the window move the threshold: a latent far below has neither an L0 nor a
    gradient of one. The threshold itself is learnt, not its logarithm, whose steps under Adam would shrink with it.

    `penalty` "l0" counts active latents, and the window's gradients move thresholds only. With "tanh", Anthropic's,
    each counts tanh(tanh_scale · a · ‖row‖), and these gradients reach the encoder as well.
    """

    loss_names = ("mse", "sparsity")
    biases = ("b_enc", "threshold")
    # Near its own equilibrium λ is a thousandth of the variance. From ten times that Adam remembers gradients so large
    # that thresholds hardly move any more, and L0 fell to 24 for k = 32 in 500 steps; from here it was 29. Below k the
    # weight may turn negative, as that of a penalty (L0 − k)² does.
    steering = Steering(start=0.0005, gain=10, integral_gain=0.01, lowest=-20, most=10)
    # Thresholds at the start. From 0.3 L0 was 39 after 200 steps, from 0.5 it was 32, from 0.7 it was 26; k was 32.
    threshold_at_start = 0.5

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        d_out: int | None = None,
        *,
        k: int,
        sparsity_coefficient: float | str,
        sparsity_warmup_fraction: float,
        penalty: str,
        tanh_scale: float,
        bandwidth: float,
    ) -> None:
        super().__init__(
            d_in,
            d_sae,
            d_out,
            k=k,
            sparsity_coefficient=sparsity_coefficient,
            sparsity_warmup_fraction=sparsity_warmup_fraction,
        )
        self._tanh_scale, self._bandwidth = tanh_scale if penalty == "tanh" else None, bandwidth
        self.threshold = nn.Parameter(torch.zeros(d_sae))

    def forward(self, x: Tensor, y: Tensor) -> Output:
        # All that is active or within the window; the rest has no part in loss or gradient.
        lowest = self.threshold.detach() - (self._bandwidth / 2 if self.training else 0)
        pre_acts = self.encode_above(x, lowest)
        threshold = pre_acts.at(self.threshold).expand_as(pre_acts.values)
        jumped = _Jump.apply(pre_acts.values, threshold, self._bandwidth, self._tanh_scale is not None)  # type: ignore[no-untyped-call]
        acts = pre_acts.with_values(jumped)
        x_hat = self.decode_acts(acts, x)
        losses = {"mse": squared_error(y, x_hat), "sparsity": self._sparsity(pre_acts, acts, threshold)}
        self.count(acts, len(y), losses["mse"])
        return Output(acts, x_hat, losses)

    def _sparsity(self, pre_acts: Acts, acts: Acts, threshold: Tensor) -> Tensor:
        if self._tanh_scale is None:
            active: Tensor = _Step.apply(pre_acts.values, threshold, self._bandwidth)  # type: ignore[no-untyped-call]
            return active.sum()
        squashed = torch.tanh(self._tanh_scale * acts.values * acts.at(self.W_dec.norm(dim=1)))
        return squashed.sum()

    @torch.no_grad()
    def constrain(self, skips: Tensor | None = None, rows: slice = ALL) -> None:
        super().constrain(skips, rows)
        # Below 0 nothing jumps, and the window's gradients would be those of something that does not happen.
        self.threshold[rows].clamp_min_(0)

    def raise_bar(self, bound: Tensor) -> None:
        self.threshold.add_(self.threshold_at_start)
        self.b_enc.add_(self.threshold_at_start - bound)

    def export_config(self) -> dict[str, Any]:
        return {"architecture": self.saelens_name("jumprelu")}

    def export_weights(self) -> dict[str, Tensor]:
        return super().export_weights() | {"threshold": self.threshold / self.y_scale}


class _Jump(torch.autograd.Function):
    """relu(z) where z > θ, else 0. For θ the gradient is −θ/ε within the window, for z that of the value.

    As the jump depends on z − θ, the window's gradient for z is the opposite of that for θ; z gets it if `takes_it`.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, threshold: Tensor, bandwidth: float, takes_it: bool) -> Tensor:
        ctx.save_for_backward(z, threshold)
        ctx.bandwidth, ctx.takes_it = bandwidth, takes_it
        return z.relu() * (z > threshold)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, threshold = ctx.saved_tensors
        grad_threshold = grad * threshold * _window(z, threshold, ctx.bandwidth)
        grad_z = grad * ((z > threshold) & (z > 0))
        return grad_z - grad_threshold if ctx.takes_it else grad_z, grad_threshold, None, None


class _Step(torch.autograd.Function):
    """1 where z > θ, else 0. For θ the gradient is −1/ε within the window, for z there is none."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(z, threshold)
        ctx.bandwidth = bandwidth
        return (z > threshold).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, threshold = ctx.saved_tensors
        return None, grad * _window(z, threshold, ctx.bandwidth), None


def _window(z: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
    """Return the derivative by the threshold of a step's mean over the window: −1/bandwidth within it, else 0."""
    return ((z - threshold).abs() < bandwidth / 2) * (-1 / bandwidth)
