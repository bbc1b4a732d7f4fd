"""`interval.add_if_finite` as a single kernel that takes as long as one of the four torch operations it replaces."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The number of elements per program.
_PART = 1024


def add_if_finite(total: Tensor, numbers: Tensor) -> None:
    """Add numbers [n] to a float64 `total` [n] in place, as `interval.add_if_finite` does."""
    if n := len(total):
        together = numbers.sum(dtype=torch.float64)
        # Triton launches kernels on the current device, not necessarily on the tensors' device.
        with torch.cuda.device_of(total):
            _add[triton.cdiv(n, _PART),](total, numbers, together, n, PART=_PART, num_warps=4)


def try_out(device: torch.device) -> None:
    """Test the kernel, letting Triton errors propagate; raise `RuntimeError` if the results are wrong."""
    total, numbers = torch.ones(2, dtype=torch.float64, device=device), torch.tensor([2.0, 3.0], device=device)
    add_if_finite(total, numbers)
    add_if_finite(total, numbers / 0)
    if total.tolist() != [3, 4]:
        raise RuntimeError("the kernels give wrong results")


@triton.jit
def _add(inout_total, numbers, together, n, PART: tl.constexpr):
    """Add one block of numbers to the totals, unless the sum of all numbers, `together`, is not finite."""
    at = tl.program_id(0) * PART + tl.arange(0, PART)
    inside = at < n
    number = tl.load(numbers + at, mask=inside, other=0).to(tl.float64)
    added = tl.where(tl.load(together) * 0 == 0, number, 0.0)
    tl.store(inout_total + at, tl.load(inout_total + at, mask=inside, other=0) + added, mask=inside)
