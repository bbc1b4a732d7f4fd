"""The kernels, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.interpreted import run_cases

from trainer.optimizers import row_adam
from trainer.runtime.triton_kernels import working_kernels

CASES = Path(__file__).with_name("update_cases.py")


def test_the_kernels_agree_with_float64_and_with_whole_passes() -> None:
    run_cases(CASES)


def test_a_machine_where_triton_fails_is_told_so_and_goes_without() -> None:
    # There is nothing to run a kernel on but this CPU. It is told once.
    working_kernels.cache_clear()
    with pytest.warns(UserWarning, match="steps on cpu go without Triton"):
        assert row_adam._working_kernels(torch.device("cpu")) is None


def test_a_cpu_goes_without_triton() -> None:
    assert row_adam.kernels_for(torch.zeros(1)) is None
