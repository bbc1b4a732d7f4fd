"""Checks gradients for finite values, scales the loss for fp16, and clips gradient norms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.runtime.triton_kernels import GRADIENT_SCALES

# The largest fp16 loss scale. The fp32 sums would allow 2^60, but once latents die, AuxK multiplies in fp16, where such
# a scale would overflow. Each halving costs a skipped step, and a run tolerates only a few consecutive skipped steps.
LARGEST_SCALE = 2.0**24


class LossScale:
    """The fp16 loss scale, which keeps small gradients from underflowing; for other precisions, it is always 1.

    The scale halves when a gradient overflows and doubles after 2,000 steps without an overflow. All updates happen on
    the device.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.factor = torch.full((), 2.0**15 if enabled else 1.0, device=device)
        self._clean_steps = torch.zeros((), dtype=torch.int32, device=device)

    def mean(self, loss: Tensor, n_tokens: int) -> Tensor:
        """Return `loss`, a sum over tokens, divided by `n_tokens` and multiplied by the loss scale."""
        return loss * (self.factor / n_tokens if self.enabled else 1 / n_tokens)

    def update(self, found_inf: Tensor) -> None:
        """Adjust the factor after a step; `found_inf` (0-dim) is 1 if the gradient was not finite."""
        if self.enabled:
            torch._amp_update_scale_(self.factor, self._clean_steps, found_inf, 2.0, 0.5, 2000)
            self.factor.clamp_(max=LARGEST_SCALE)

    def state(self) -> dict[str, Tensor]:
        return {"factor": self.factor, "clean_steps": self._clean_steps} if self.enabled else {}

    def load(self, state: dict[str, Tensor]) -> None:
        if self.enabled and state:
            self.factor.copy_(state["factor"])
            self._clean_steps.copy_(state["clean_steps"])


def total_square(gradients: list[Tensor], device: torch.device | None = None) -> Tensor:
    """Return Σ‖g‖² over all gradients, fp64, 0-dim, in one read-only pass; for an empty list, return 0 on `device`.

    On a CPU, torch sums a whole matrix sequentially in fp32: the norm of 50 million values is off by 0.4 %, and by a
    different amount if each rank holds a part of the matrix. Summing per latent is as fast, and accurate to 7 digits.
    """
    if any(gradient.is_cuda for gradient in gradients):
        of_each = torch._foreach_norm(gradients)
        return of_each[0].double().square() if len(of_each) == 1 else torch.stack(of_each).double().square().sum()
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [torch.linalg.vector_norm(gradient, dim=-1).double() for gradient in gradients]
    return torch.stack([norm.square().sum() for norm in norms]).sum()


class GradientCheck(NamedTuple):
    """The result of checking a step's gradient; all tensors are 0-dim and stay on the device.

    The optimizer divides gradients by `divisor`; None means 1. If the norm is not finite, the step is skipped: `skips`
    (bool) is true, `bad` is 1, `taken` is 0 and `n_tokens` is 0. `bad_gradient` is then also 1, unless the gradient was
    deliberately made non-finite because activations were lost. If the step is taken, `taken` is 1 and `n_tokens` is its
    token count.
    """

    divisor: Tensor | None
    skips: Tensor
    bad: Tensor
    bad_gradient: Tensor
    taken: Tensor
    n_tokens: Tensor


class GradientChecks:
    """Checks the gradients for steps of `expected` tokens, and clips their norms to `largest` (0 disables clipping).

    `norm` (0-dim) is the last gradient's norm without the loss scale. `skipped` [3] contains the number of steps
    skipped in this log interval, the number of consecutive skips not caused by lost activations, and the number of
    skips in the interval caused by lost activations. Both tensors are updated in place, since a CUDA graph always
    operates on the same memory.
    """

    def __init__(self, device: torch.device, expected: int, largest: float) -> None:
        self._expected, self._largest = expected, largest
        self.norm, self.skipped = torch.zeros((), device=device), torch.zeros(3, device=device)

    @torch.no_grad()
    def of(
        self, of_latents: Tensor, of_all: Tensor, factor: Tensor, n_tokens: Tensor, overflowed: Tensor | None
    ) -> GradientCheck:
        """Check a gradient, given its squared norms (fp64), the loss scale `factor` and the step's token count.

        `overflowed` (bool) is true if activations were lost, or None if they cannot be lost. All tensors are 0-dim.
        """
        if triton := GRADIENT_SCALES.on(factor):
            given = of_latents, of_all, factor, n_tokens, overflowed
            return GradientCheck(*triton.judge(self.norm, self.skipped, *given, self._expected, self._largest))
        norm = (of_latents + of_all).sqrt().float()
        norm, divisor, skips = prepare(norm, factor * (n_tokens / self._expected), self._largest)
        bad = skips.float()
        bad_gradient = bad if overflowed is None else bad * ~overflowed
        self.norm.copy_(norm)
        self.skipped += torch.stack([bad, bad_gradient, bad - bad_gradient])
        self.skipped[1].mul_(bad)
        return GradientCheck(divisor, skips, bad, bad_gradient, 1 - bad, n_tokens.masked_fill(skips, 0))


@torch.no_grad()
def prepare(norm: Tensor, scale: Tensor, largest: float) -> tuple[Tensor, Tensor | None, Tensor]:
    """Given a gradient's `norm`, return the unscaled norm, the divisor for gradients, and whether to skip the step.

    The divisor removes the loss scale `scale` and clips the norm to `largest` (0 disables clipping). On a CPU, where
    reading the value costs nothing, the divisor is None if it would be 1. The step is skipped if the norm is not
    finite. All tensors are 0-dim and stay on the device.
    """
    norm = norm / scale
    # torch.nn.utils.clip_grad_norm_ uses the same epsilon.
    divisor = scale * ((norm + 1e-6) / largest).clamp_min(1) if largest else scale
    needed = divisor.is_cuda or float(divisor) != 1
    # inf · 0 and nan · 0 are nan. This test takes two operations on a GPU, while `isfinite` takes four.
    return norm, divisor if needed else None, norm * 0 != 0
