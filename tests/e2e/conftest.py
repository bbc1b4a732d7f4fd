"""Fixtures for tests that use a data folder, the demo app in pseudo-terminals, and shell commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.box import Box
from support.driver import build_drivers


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build fake versions of NVIDIA's library in the folders `new`, `old` and `none`."""
    return build_drivers(tmp_path_factory.mktemp("fake_nvml"))
