"""Compares this machine's reported memory with psutil's values."""

from __future__ import annotations

import psutil
import pytest

from trainer.contract.machine_memory import machine_memory


def test_the_reported_machine_memory_matches_psutil() -> None:
    memory = machine_memory()
    assert memory.total_bytes == psutil.virtual_memory().total
    assert memory.available_bytes == pytest.approx(psutil.virtual_memory().available, rel=0.2)
