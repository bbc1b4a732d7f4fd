"""Checks the kernel that prepares a step against equivalent torch operations.

`test_triton_scale.py` runs this file in a separate process. With TRITON_INTERPRET=1, the kernel runs on a CPU;
otherwise it needs a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch
from support.combinations import combined
from torch import Tensor

from trainer.training import gradients, triton_scale

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("square", "factor", "n_tokens", "largest", "overflowed"),
    combined(
        (0.0, 1e-30, 3e-4, 7.0, 1e30, 1e90, torch.inf, torch.nan),
        (1.0, 2.0**15),
        (0, 777, 4096),
        (0.0, 1.0, 0.3),
        (None, False, True),
    ),
)
def test_the_kernel_matches_the_equivalent_torch_operations(
    square: float, factor: float, n_tokens: int, largest: float, overflowed: bool | None
) -> None:
    squares = number(square, torch.float64), number(square / 3, torch.float64)
    lost = None if overflowed is None else torch.tensor(overflowed, device=DEVICE)
    given = *squares, number(factor), number(n_tokens), lost
    by_kernel, by_torch = (gradients.GradientChecks(DEVICE, 4096, largest) for _ in range(2))
    for one in (by_kernel, by_torch):
        one.skipped.copy_(torch.tensor([5.0, 3.0, 2.0]))
    expected = by_torch.of(*given)
    found = gradients.GradientCheck(*triton_scale.judge(by_kernel.norm, by_kernel.skipped, *given, 4096, largest))
    torch.testing.assert_close(by_kernel.norm, by_torch.norm, rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(by_kernel.skipped, by_torch.skipped)
    for name in ("skips", "bad", "bad_gradient", "taken", "n_tokens"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    if not expected.skips:
        divisor = number(1.0) if expected.divisor is None else expected.divisor
        torch.testing.assert_close(found.divisor, divisor, rtol=1e-6, atol=0)


def test_the_kernel_passes_its_own_trial() -> None:
    triton_scale.try_out(DEVICE)


def test_a_trial_with_wrong_results_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_scale.judge
    monkeypatch.setattr(triton_scale, "judge", lambda *given: right(*given[:-2], 64, 2.5))
    with pytest.raises(RuntimeError, match="wrong results"):
        triton_scale.try_out(DEVICE)
