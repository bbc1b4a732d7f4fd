"""Random keys in a real terminal. A thousand seeds: `PYTHONPATH=tests python -m support.monkey --seeds 0:1000`."""

from __future__ import annotations

import pytest
from support import monkey


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(10))
def test_two_thousand_random_keys_break_nothing(seed: int) -> None:
    result = monkey.run(seed, 2000)
    assert not result.faults, f"{result}; the last keys: {result.tail}"
    assert result.keys >= 2000
