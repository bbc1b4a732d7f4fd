"""Checks the kernel that sums metrics against equivalent torch operations.

`test_triton_interval.py` runs this file in a separate process. With TRITON_INTERPRET=1, the kernel runs on a CPU;
otherwise it needs a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch
from support.kernels import NO_KERNELS, use_kernels

from trainer.metrics import interval, triton_interval

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.mark.parametrize("n", [0, 1, 1024, 2500])
@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf, -torch.inf])
def test_values_are_added_only_if_all_of_them_are_finite(n: int, bad: float | None) -> None:
    generator = torch.Generator().manual_seed(n)
    numbers = torch.randn(n, generator=generator).to(DEVICE)
    if bad is not None and n:
        numbers[n // 2] = bad
    # The kernel must not change the second row of the sums.
    total = torch.randn(2, n, generator=generator, dtype=torch.float64).to(DEVICE)
    by_kernel, by_torch = total.clone(), total.clone()
    triton_interval.add_if_finite(by_kernel[0], numbers)
    with use_kernels(NO_KERNELS):
        interval.add_if_finite(by_torch[0], numbers)
    assert torch.equal(by_kernel, by_torch)
    assert torch.equal(by_kernel[0], total[0] if bad is not None else total[0] + numbers)
    assert torch.equal(by_kernel[1], total[1])


def test_the_kernel_passes_its_own_trial() -> None:
    triton_interval.try_out(DEVICE)


def test_a_trial_with_wrong_results_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_interval, "add_if_finite", lambda total, numbers: total.add_(numbers))
    with pytest.raises(RuntimeError, match="wrong results"):
        triton_interval.try_out(DEVICE)
