"""Runs `dead_latent_cases.py` on a GPU, or in Triton's interpreter if there is no GPU."""

from __future__ import annotations

from pathlib import Path

from support.interpreted import in_two_shares, run_cases

CASES = Path(__file__).with_name("dead_latent_cases.py")


@in_two_shares
def test_the_kernels_match_the_equivalent_torch_operations(among: str) -> None:
    run_cases(CASES, among=among)
