"""The kernel that prepares a step against torch's operations; `test_triton_scale.py` runs this in its own process.

With TRITON_INTERPRET=1 kernels run on a CPU; without it they need a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from trainer.training import gradients, triton_scale

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("square", [0.0, 1e-30, 3e-4, 7.0, 1e30, 1e90, torch.inf, torch.nan])
@pytest.mark.parametrize("factor", [1.0, 2.0**15])
@pytest.mark.parametrize("n_tokens", [0, 777, 4096])
@pytest.mark.parametrize("largest", [0.0, 1.0, 0.3])
def test_the_kernel_tells_what_single_operations_do(
    square: float, factor: float, n_tokens: int, largest: float
) -> None:
    of_latents, of_all = number(square, torch.float64), number(square / 3, torch.float64)
    scale = number(factor) * (number(n_tokens) / 4096)
    norm, divisor, skips = gradients.prepare((of_latents + of_all).sqrt().float(), scale, largest)
    found = triton_scale.prepare(of_latents, of_all, number(factor), number(n_tokens), 4096, largest)
    assert bool(found[2]) == bool(skips)
    torch.testing.assert_close(found[0], norm, rtol=1e-6, atol=0, equal_nan=True)
    if not skips:
        torch.testing.assert_close(found[1], number(1.0) if divisor is None else divisor, rtol=1e-6, atol=0)


def test_the_kernel_passes_its_own_trial() -> None:
    triton_scale.try_out(DEVICE)


def test_a_trial_with_wrong_results_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_scale.prepare
    monkeypatch.setattr(triton_scale, "prepare", lambda *given: right(*given[:4], 64, 2.5))
    with pytest.raises(RuntimeError, match="wrong results"):
        triton_scale.try_out(DEVICE)
