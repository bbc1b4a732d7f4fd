from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sae_tui.compare.front import front

few = st.integers(0, 6).map(float)  # so few values that points often share one or both


@given(st.lists(st.tuples(few, few), max_size=25))
def test_the_front_agrees_with_a_comparison_of_every_pair(points) -> None:
    beaten = {
        place for place, (x, y) in enumerate(points) if any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    }
    assert front(points) == set(range(len(points))) - beaten


def test_the_front_of_no_points_is_empty() -> None:
    assert front([]) == set()
