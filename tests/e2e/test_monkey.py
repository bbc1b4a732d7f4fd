"""Tests random keys in a real terminal.

For a thousand seeds, run `PYTHONPATH=tests python -m support.monkey --seeds 0:1000`.
"""

from __future__ import annotations

import pytest
from support import monkey

N_KEYS = 700


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_random_keys_break_nothing(seed: int) -> None:
    result = monkey.run(seed, N_KEYS)
    assert not result.faults, f"{result}; the last keys: {result.tail}"
    assert result.keys >= N_KEYS
