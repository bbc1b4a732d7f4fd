"""Tests that random keys do not break the app in a real terminal.

For a thousand seeds, run `PYTHONPATH=tests python -m support.monkey --seeds 0:1000`.
"""

from __future__ import annotations

import pytest
from support import monkey


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seed", "n_keys"), [(0, 300), pytest.param(1, 1400, marks=pytest.mark.slow)])
def test_the_app_survives_random_keys(seed: int, n_keys: int) -> None:
    result = monkey.run(seed, n_keys)
    assert not result.faults, f"{result}; the last keys: {result.tail}"
    assert result.keys >= n_keys
