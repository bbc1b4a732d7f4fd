"""The kernel, in Triton's interpreter where there is no GPU, and who uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.interpreted import run_cases

from trainer.runtime.triton_kernels import working_kernels
from trainer.saes import losses

CASES = Path(__file__).with_name("error_cases.py")


def test_the_kernel_agrees_with_float64() -> None:
    run_cases(CASES)


def test_a_machine_where_triton_fails_is_told_so_and_goes_without() -> None:
    # There is nothing to run a kernel on but this CPU. It is told once.
    working_kernels.cache_clear()
    with pytest.warns(UserWarning, match="errors of reconstructions on cpu go without Triton"):
        assert losses._working_triton(torch.device("cpu")) is None
