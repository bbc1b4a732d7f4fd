"""JumpReLU SAE (Rajamanoharan et al. 2024, arXiv 2407.14435), optionally with Anthropic's January 2025 penalty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.contract.settings.architectures import JumpReLUSettings
from trainer.saes.base import Declared, Output, SaeSpec
from trainer.saes.penalised import Penalised, Steering
from trainer.saes.sparse_acts import Acts, marked_in_columns


class JumpReLU(Penalised):
    """An SAE in which each latent is active above its own `threshold` [d_sae], learnt with straight-through gradients.

    The jump at the threshold has no gradient. The gradient of the jump's mean over a window of width `bandwidth` around
    the threshold is used instead, so only pre-activations within the window change the threshold. A latent far below
    its threshold gets no gradient. The parameter is the threshold itself, not its logarithm: with the logarithm, Adam's
    updates would become smaller as the threshold falls.

    With `penalty` "l0", the penalty is the number of active latents, and the gradients from the window change only the
    thresholds. With "tanh", Anthropic's penalty, each latent adds tanh(tanh_scale · a · ‖row‖) to the loss, and the
    gradients also reach the encoder.
    """

    settings: JumpReLUSettings
    traits = Penalised.traits._replace(losses=("mse", "sparsity"))
    # λ, the penalty's weight, settles at about 0.001 times the variance. If λ starts ten times higher, Adam's moments
    # become so large that the thresholds almost stop changing: for k = 32, L0 fell to 24 within 500 steps, but only to
    # 29 with this `start`. While L0 is below k, λ may become negative, like the derivative of the penalty (L0 − k)².
    steering = Steering(start=0.0005, gain=10, integral_gain=0.01, lowest=-20, most=10)
    # The initial value of all thresholds. After 200 steps with k = 32, L0 was 39 with an initial value of 0.3, 32 with
    # 0.5 and 26 with 0.7.
    threshold_at_start = 0.5

    def __init__(self, spec: SaeSpec) -> None:
        super().__init__(spec)
        self._tanh_scale = self.settings.tanh_scale if self.settings.penalty == "tanh" else None
        # There is no jump at a threshold below 0, so the gradients from the window would be wrong.
        self.declared["threshold"] = Declared(0, is_bias=True, lowest=0)
        self.threshold = nn.Parameter(torch.zeros(self.d_sae))

    def forward(self, x: Tensor, y: Tensor) -> Output:
        # Keep the values that are active or within the window; other values affect neither the loss nor its gradients.
        lowest = self.threshold.detach() - (self.settings.bandwidth / 2 if self.training else 0)
        pre_acts = self.encode_above(x, lowest)
        threshold, moves_z = pre_acts.at(self.threshold), self._tanh_scale is not None
        jumped, n_active = _Jump.apply(pre_acts.values, threshold, self.settings.bandwidth, moves_z)  # type: ignore[no-untyped-call]
        acts = pre_acts.with_values(jumped)
        x_hat, errors = self.reconstruct(acts, x, y)
        sparsity = n_active if self._tanh_scale is None else self._squashed(acts, self._tanh_scale)
        losses = {"mse": errors.square, "sparsity": sparsity}
        return Output(acts, x_hat, losses, errors.sums)

    def _squashed(self, acts: Acts, scale: float) -> Tensor:
        return torch.tanh(scale * acts.values * acts.at(self.W_dec.norm(dim=1))).sum()

    def _raise_bar(self, bound: Tensor) -> None:
        self.threshold.add_(self.threshold_at_start)
        self.b_enc.add_(self.threshold_at_start - bound)

    def export_config(self) -> dict[str, Any]:
        return {"architecture": self.saelens_name("jumprelu")}

    def export_weights(self) -> dict[str, Tensor]:
        return super().export_weights() | {"threshold": self.threshold / self.acts_scale}


class _Jump(torch.autograd.Function):
    """Returns z where z > θ and 0 elsewhere, and the number of active values, 0-dim; θ is at least 0.

    The jump and the count have no gradients, so the gradients of their means over the window are used. For θ, these
    gradients are −θ/ε and −1/ε inside a window of width ε. The gradient for z is the ordinary gradient of its value.
    The jump depends on z − θ, so its window gradient for z is the negative of its window gradient for θ; it is added to
    the gradient for z only if `moves_z` is set. The count has no gradient for z. The implementation minimises the
    number of passes over z.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, threshold: Tensor, bandwidth: float, moves_z: bool) -> tuple[Tensor, Tensor]:
        # The mask is False for NaN, which must not be treated as inactive.
        is_off = z <= threshold.clamp_min(0)
        ctx.save_for_backward(z, threshold, is_off)
        ctx.bandwidth, ctx.moves_z = bandwidth, moves_z
        n_off = is_off.sum() if is_off.dim() == 1 else marked_in_columns(is_off).sum(dtype=torch.float64)
        return z.masked_fill(is_off, 0), (z.numel() - n_off).to(z.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_number: Tensor) -> tuple[Tensor | None, ...]:
        z, threshold, is_off = ctx.saved_tensors
        within = (z > threshold - ctx.bandwidth / 2) & (z < threshold + ctx.bandwidth / 2)
        grad_within = grad * within
        of_value, n_within = (_summed_to(threshold, each) for each in (grad_within, within))
        grad_threshold = (of_value * threshold + n_within * grad_number) * (-1 / ctx.bandwidth)
        grad_z = grad.masked_fill(is_off, 0)
        if ctx.moves_z:
            grad_z.addcmul_(grad_within, threshold, value=1 / ctx.bandwidth)
        return grad_z, grad_threshold, None, None


def _summed_to(threshold: Tensor, values: Tensor) -> Tensor:
    """Sum `values` over tokens if all tokens share the thresholds; sparse entries each have their own threshold."""
    if values.shape == threshold.shape:
        return values
    return marked_in_columns(values) if values.dtype == torch.bool else values.sum(dim=0)
