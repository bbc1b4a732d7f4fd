"""Runs `error_cases.py` on a GPU, or in Triton's interpreter if there is no GPU."""

from __future__ import annotations

from pathlib import Path

from support.interpreted import in_two_shares, run_cases

CASES = Path(__file__).with_name("error_cases.py")


@in_two_shares
def test_the_kernels_match_a_float64_reference(among: str) -> None:
    run_cases(CASES, among=among)
