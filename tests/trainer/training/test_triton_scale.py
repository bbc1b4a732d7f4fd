"""Runs `scale_cases.py` on a GPU, or in Triton's interpreter if there is no GPU."""

from __future__ import annotations

from pathlib import Path

from support.interpreted import run_cases

CASES = Path(__file__).with_name("scale_cases.py")


def test_the_kernel_matches_the_equivalent_torch_operations() -> None:
    run_cases(CASES)
