"""Runs `update_cases.py` on a GPU, or in Triton's interpreter if there is no GPU."""

from __future__ import annotations

from pathlib import Path

from support.interpreted import run_cases

CASES = Path(__file__).with_name("update_cases.py")


def test_the_kernels_match_float64_and_passes_over_entire_tensors() -> None:
    run_cases(CASES)
