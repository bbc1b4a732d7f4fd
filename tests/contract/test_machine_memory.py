"""The memory of this machine against what another library reads."""

from __future__ import annotations

import psutil
import pytest

from trainer.contract.machine_memory import machine_memory


def test_it_is_what_psutil_says() -> None:
    memory = machine_memory()
    assert memory.total_bytes == psutil.virtual_memory().total
    assert memory.available_bytes == pytest.approx(psutil.virtual_memory().available, rel=0.2)
