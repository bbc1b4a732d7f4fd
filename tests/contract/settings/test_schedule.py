from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract.settings.schedule import lr_factor


def test_the_learning_rate_rises_linearly_then_stays_constant_then_falls_linearly() -> None:
    factors = [lr_factor(step, 100, 0.1, 0.2) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert factors[10:80] == [1.0] * 70
    assert factors[80:] == pytest.approx([1 - 0.05 * step for step in range(20)])


@given(st.integers(1, 500), st.floats(0, 1), st.floats(0, 1))
def test_no_step_in_any_run_has_a_zero_learning_rate(total: int, warmup: float, decay: float) -> None:
    assert all(0 < lr_factor(step, total, warmup, decay) <= 1 for step in range(total))
