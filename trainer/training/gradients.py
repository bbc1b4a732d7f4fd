"""What happens between backward pass and step: is the gradient finite, and is it too long?"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.runtime.triton_kernels import working_kernels

# The largest factor on an fp16 loss. Of sums in fp32 it could go up to 2^60; when latents die AuxK multiplies in fp16,
# and a step would be skipped for each time that it halves: more than training puts up with.
LARGEST_SCALE = 2.0**24


class LossScale:
    """The factor on an fp16 loss, without which small gradients would be 0; 1 and idle for every other precision.

    It halves where a gradient overflowed and doubles after 2,000 steps without one, all on the device.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.factor = torch.full((), 2.0**15 if enabled else 1.0, device=device)
        self._clean_steps = torch.zeros((), dtype=torch.int32, device=device)

    def mean(self, loss: Tensor, n_tokens: int) -> Tensor:
        """Return the mean over so many tokens of a loss that is their sum, times the factor."""
        return loss * (self.factor / n_tokens if self.enabled else 1 / n_tokens)

    def update(self, found_inf: Tensor) -> None:
        """Adjust the factor after a step; `found_inf` (0-dim) is 1 where its gradient was infinite."""
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
    """Return Σ‖g‖² of all gradients, fp64, 0-dim, in one pass that only reads; that of none is on `device`.

    A CPU adds up a whole matrix in fp32 one number after the other: the norm of 50 million is off by 4 in 1,000, and
    by another amount where ranks have a part each. Added up by latents it is as fast, and exact to 7 digits.
    """
    if any(gradient.is_cuda for gradient in gradients):
        of_each = torch._foreach_norm(gradients)
        return of_each[0].double().square() if len(of_each) == 1 else torch.stack(of_each).double().square().sum()
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [torch.linalg.vector_norm(gradient, dim=-1).double() for gradient in gradients]
    return torch.stack([norm.square().sum() for norm in norms]).sum()


class Verdict(NamedTuple):
    """What a step has to know of its gradient; all are 0-dim, and stay on the device.

    `divisor` is the number by which the optimizer has to divide gradients; None for 1. Where a step `skips` (bool),
    since the norm is not finite, `bad` is 1, and `bad_gradient` is, unless it was made so because activations were
    lost; `taken` is 1 where it does not. `n_tokens` are those of the step; of one that is skipped none.
    """

    divisor: Tensor | None
    skips: Tensor
    bad: Tensor
    bad_gradient: Tensor
    taken: Tensor
    n_tokens: Tensor


class Verdicts:
    """Judges the gradients of steps of `expected` tokens and clips their norms to `largest` (0: never).

    `norm` (0-dim) is the last gradient's without the loss scale. `skipped` [3] are the steps skipped in this log
    interval, those in a row up to now, and those of the interval's whose gradient was made infinite because activations
    were lost. They change in place, as all that outlives a step: a recorded one repeats what is done to memory, and
    nothing else.
    """

    def __init__(self, device: torch.device, expected: int, largest: float) -> None:
        self._expected, self._largest = expected, largest
        self.norm, self.skipped = torch.zeros((), device=device), torch.zeros(3, device=device)

    @torch.no_grad()
    def of(
        self, of_latents: Tensor, of_all: Tensor, factor: Tensor, n_tokens: Tensor, overflowed: Tensor | None
    ) -> Verdict:
        """Judge a gradient by the squares of its parts (fp64), the loss scale `factor` and the tokens that came.

        `overflowed` (bool) tells whether activations were lost; None: never. All are 0-dim.
        """
        if factor.is_cuda and (triton := _working_triton(factor.device)):
            given = of_latents, of_all, factor, n_tokens, overflowed
            return Verdict(*triton.judge(self.norm, self.skipped, *given, self._expected, self._largest))
        norm = (of_latents + of_all).sqrt().float()
        norm, divisor, skips = prepare(norm, factor * (n_tokens / self._expected), self._largest)
        bad = skips.float()
        bad_gradient = bad if overflowed is None else bad * ~overflowed
        self.norm.copy_(norm)
        self.skipped += torch.stack([bad, bad_gradient, bad - bad_gradient])
        self.skipped[1].mul_(bad)
        return Verdict(divisor, skips, bad, bad_gradient, 1 - bad, n_tokens.masked_fill(skips, 0))


def _working_triton(device: torch.device) -> ModuleType | None:
    return working_kernels("trainer.training.triton_scale", device)


@torch.no_grad()
def prepare(norm: Tensor, scale: Tensor, largest: float) -> tuple[Tensor, Tensor | None, Tensor]:
    """Derive from a gradient's `norm` (0-dim) what the step has to know.

    Return the norm without the loss scale `scale`; the number by which the optimizer has to divide gradients, which
    takes that scale out and clips the norm to `largest` (0: never), or None for 1; and whether the step is to be
    skipped since the norm is not finite, bool. All are 0-dim and stay on the device: only on a CPU is it known at no
    cost that nothing has to be divided.
    """
    norm = norm / scale
    # The small number is that of torch.nn.utils.clip_grad_norm_.
    divisor = scale * ((norm + 1e-6) / largest).clamp_min(1) if largest else scale
    needed = divisor.is_cuda or float(divisor) != 1
    # What is not finite is no number once it is multiplied by 0: two operations where `isfinite` takes a GPU four.
    return norm, divisor if needed else None, norm * 0 != 0
