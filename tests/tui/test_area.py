"""Tests for histories drawn as area charts with an axis."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from sae_tui.format import BLOCKS
from sae_tui.widgets.area import area, beside, columns_of, time_axis

shares = st.lists(st.none() | st.floats(0, 1), max_size=80)


def width_of(line) -> int:
    return sum(cell_len(text) for text, _ in line)


@given(shares, st.integers(8, 90), st.integers(1, 12), st.none() | st.integers(-3, 90))
def test_every_row_has_the_requested_width_and_the_newest_value_is_at_the_right(history, width, height, cursor) -> None:
    heading = ((" " * width, "title"),)
    lines = area(heading, history, style="bar", ceiling=100.0, width=width, height=height, cursor=cursor)
    assert [width_of(line) for line in lines] == [width] * (height + 1)
    drawn = ["".join(text for text, _ in line)[6:-1] for line in lines[1:]]
    for column, value in enumerate(reversed(history[-columns_of(width) :] if columns_of(width) else []), start=1):
        place = columns_of(width) - column
        if place == cursor:
            continue
        eighths = sum(BLOCKS.index(row[place]) for row in drawn)
        assert (eighths == 0) == (value is None)
        assert value is None or abs(eighths - max(1, value * 8 * height)) <= 1


def test_the_axis_shows_its_ends_and_if_there_is_space_its_middle() -> None:
    heading = (("x", "title"),)
    tall, low = (
        ["".join(text for text, _ in line).split("┤")[0].strip(" │") for line in
         area(heading, [0.5], style="bar", ceiling=350.0, width=20, height=height)[1:]]
        for height in (5, 2)
    )  # fmt: skip
    assert [label for label in tall if label.strip("▁▂▃▄▅▆▇█ │")] == ["350", "175", "0"]
    assert low == ["350", "0"]


def test_the_cursor_is_drawn_in_its_column_on_every_row() -> None:
    lines = area((("x", "title"),), [1.0] * 10, style="bar", ceiling=1.0, width=17, height=3, cursor=4)
    assert [[text for text, style in line if style == "title"] for line in lines[1:]] == [["█"]] * 3


def test_two_plots_are_side_by_side_with_a_time_axis_below() -> None:
    left, right = ([((name * 3, "text"),)] for name in "ab")
    assert beside(left, right, 2) == [(("aaa", "text"), ("  ", "text"), ("bbb", "text"))]
    assert time_axis("last 1 h", "now", 30)[0][0] == "      last 1 h            now "
