"""A fixture with a stub of SkyPilot's command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sky import Sky


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sky]:
    stub = Sky(tmp_path / "sky", monkeypatch)
    yield stub
    stub.close()
