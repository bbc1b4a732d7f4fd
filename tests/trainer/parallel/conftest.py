"""These tests are about what ranks do together, not how they start, so ranks are forked."""

from __future__ import annotations

import pytest


@pytest.fixture
def forked() -> bool:
    return True
