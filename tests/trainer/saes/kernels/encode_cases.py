"""Checks the kernel that centres rows against equivalent torch operations.

`test_triton_encode.py` runs this file in a separate process. With TRITON_INTERPRET=1, the kernel runs on a CPU;
otherwise it needs a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from trainer.saes.kernels import triton_encode

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (8, 256), (21, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_centred_and_rounded_as_in_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, bias = (torch.randn(*size, generator=torch.Generator().manual_seed(7)).to(DEVICE) for size in (shape, shape[1:]))
    x[:, 0] = torch.nan
    found = triton_encode.centre(x, bias, dtype)
    # Triton's interpreter truncates to bf16 rather than rounding.
    rtol = 2**-7 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(found, (x - bias).to(dtype), rtol=rtol, atol=0, equal_nan=True)


def test_rows_with_an_unsupported_layout_or_dtype_are_left_to_torch() -> None:
    x = torch.zeros(4, 6, device=DEVICE)
    assert triton_encode.fits(x, x[0])
    assert not triton_encode.fits(x.T, x[:, 0])
    assert not triton_encode.fits(x.half(), x[0])


def test_the_kernel_passes_its_own_trial() -> None:
    triton_encode.try_out(DEVICE, torch.float16)


def test_a_trial_with_wrong_results_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_encode, "centre", lambda x, bias, dtype: x.to(dtype))
    with pytest.raises(RuntimeError, match="wrong results"):
        triton_encode.try_out(DEVICE, torch.float16)
