"""Computes a `gradients.GradientCheck` in one Triton kernel; sixteen torch kernels would take 3 % of a short step."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def judge(
    norm: Tensor,
    skipped: Tensor,
    of_latents: Tensor,
    of_all: Tensor,
    factor: Tensor,
    n_tokens: Tensor,
    overflowed: Tensor | None,
    expected: int,
    largest: float,
) -> tuple[Tensor, ...]:
    """Return the fields of a `gradients.GradientCheck`, as `GradientChecks.of` does; update `norm` and `skipped`."""
    divisor, bad, bad_gradient, taken, of_step = torch.empty(5, device=factor.device).unbind()
    skips = torch.empty((), dtype=torch.bool, device=factor.device)
    # Triton launches kernels on the current device, not necessarily on the tensors' device.
    with torch.cuda.device_of(factor):
        _judge[1,](
            norm, skipped, divisor, skips, bad, bad_gradient, taken, of_step,
            of_latents, of_all, factor, n_tokens, overflowed, float(expected), largest, num_warps=1,
        )  # fmt: skip
    return divisor, skips, bad, bad_gradient, taken, of_step


def try_out(device: torch.device) -> None:
    """Run the kernel once, letting Triton errors propagate; raise `RuntimeError` if the results are wrong."""
    numbers = torch.tensor([9.0, 16.0, 2.0, 64.0, 0.0], dtype=torch.float64, device=device)
    norm, skipped = numbers[0].float(), torch.ones(3, device=device)
    given = numbers[0], numbers[1], numbers[2].float(), numbers[3].float(), numbers[4].bool()
    divisor, *others = judge(norm, skipped, *given, 128, 2.5)
    are_right = [float(one) for one in others] == [0, 0, 0, 1, 64] and skipped.tolist() == [1, 0, 1]
    if norm != 5 or not 2 <= divisor < 2.00001 or not are_right:
        raise RuntimeError("the kernels give wrong results")


@triton.jit
def _judge(
    out_norm, inout_skipped, out_divisor, out_skips, out_bad, out_bad_gradient, out_taken, out_n_tokens,
    of_latents, of_all, factor, n_tokens, overflowed, expected, largest,
):  # fmt: skip
    """Store the unscaled norm, the divisor that removes the scale and clips, and flags for a non-finite norm."""
    came = tl.load(n_tokens)
    scale = tl.load(factor) * (came / expected)
    norm = tl.sqrt(tl.load(of_latents) + tl.load(of_all)).to(tl.float32) / scale
    clipped = tl.maximum((norm + 1e-6) / largest, 1.0)
    skips = norm * 0 != 0
    bad = skips.to(tl.float32)
    bad_gradient = bad
    if overflowed is not None:
        bad_gradient = tl.where(tl.load(overflowed) != 0, 0.0, bad)
    tl.store(out_norm, norm)
    tl.store(out_divisor, tl.where(largest > 0, scale * clipped, scale))
    tl.store(out_skips, skips)
    tl.store(out_bad, bad)
    tl.store(out_bad_gradient, bad_gradient)
    tl.store(out_taken, 1 - bad)
    tl.store(out_n_tokens, tl.where(skips, 0.0, came))
    tl.store(inout_skipped, tl.load(inout_skipped) + bad)
    tl.store(inout_skipped + 1, (tl.load(inout_skipped + 1) + bad_gradient) * bad)
    tl.store(inout_skipped + 2, tl.load(inout_skipped + 2) + bad - bad_gradient)
