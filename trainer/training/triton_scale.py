"""What `gradients.prepare` makes of a gradient's norm, by one kernel where torch's operations on single numbers take
twelve, which is 2 % of a short step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def prepare(
    of_latents: Tensor, of_all: Tensor, factor: Tensor, n_tokens: Tensor, expected: int, largest: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm, divisor and whether to skip, as `gradients.prepare` does."""
    norm, divisor = (torch.empty((), device=factor.device) for _ in range(2))
    skips = torch.empty((), dtype=torch.bool, device=factor.device)
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(factor):
        _prepare[1,](norm, divisor, skips, of_latents, of_all, factor, n_tokens, float(expected), largest, num_warps=1)
    return norm, divisor, skips


def try_out(device: torch.device) -> None:
    """Run the kernel once; raise what Triton raises where it cannot, and `RuntimeError` where results are wrong."""
    numbers = torch.tensor([9.0, 16.0, 2.0, 64.0], dtype=torch.float64, device=device)
    norm, divisor, skips = prepare(numbers[0], numbers[1], numbers[2].float(), numbers[3].float(), 128, 2.5)
    if norm != 5 or not 2 <= divisor < 2.00001 or skips:
        raise RuntimeError("the kernels give wrong results")


@triton.jit
def _prepare(out_norm, out_divisor, out_skips, of_latents, of_all, factor, n_tokens, expected, largest):
    """Write the norm without its scale, the divisor that takes that out and clips, and whether the norm is finite."""
    scale = tl.load(factor) * (tl.load(n_tokens) / expected)
    norm = tl.sqrt(tl.load(of_latents) + tl.load(of_all)).to(tl.float32) / scale
    clipped = tl.maximum((norm + 1e-6) / largest, 1.0)
    tl.store(out_norm, norm)
    tl.store(out_divisor, tl.where(largest > 0, scale * clipped, scale))
    tl.store(out_skips, norm * 0 != 0)
