"""What is tested here is what ranks do together, not how they start."""

from __future__ import annotations

import pytest


@pytest.fixture
def forked() -> bool:
    return True
