"""An example of a Triton kernel module."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PART = 64


def double(x: Tensor) -> Tensor:
    """Return 2x, like `x + x`, for contiguous x."""
    out = torch.empty_like(x)
    # Triton launches kernels on the current device, which may differ from the tensor's device.
    with torch.cuda.device_of(x):
        _double[triton.cdiv(x.numel(), _PART),](out, x, x.numel(), PART=_PART)
    return out


def try_out(device: torch.device) -> None:
    """Run the kernel once. Raise Triton's error if it fails, and `RuntimeError` if its results are wrong."""
    x = torch.arange(100.0, device=device)
    if not torch.equal(double(x), x + x):
        raise RuntimeError("the kernel gives wrong results")


@triton.jit
def _double(out, x, n, PART: tl.constexpr):
    """Write 2x to `out`."""
    at = tl.program_id(0) * PART + tl.arange(0, PART)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)
