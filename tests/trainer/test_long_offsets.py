"""Kernels find rows that begin 2³¹ numbers into a matrix."""

from __future__ import annotations

from pathlib import Path

from support.interpreted import run_cases

CASES = Path(__file__).with_name("long_offset_cases.py")


def test_kernels_find_rows_beyond_what_32_bits_count() -> None:
    run_cases(CASES, on_cpu=True)
