"""Tests that kernels work on a row that starts 2³¹ elements into a matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.interpreted import run_cases

CASES = Path(__file__).with_name("long_offset_cases.py")


@pytest.mark.slow
def test_kernels_read_and_write_rows_beyond_32_bit_offsets() -> None:
    run_cases(CASES, on_cpu=True)
