"""Tests for histories drawn as area charts with an axis."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from sae_tui.format import BLOCKS, RAIL
from sae_tui.widgets.area import area, columns_of, side_by_side, time_axis, with_marks

shares = st.lists(st.none() | st.floats(0, 1), max_size=80)


def width_of(line) -> int:
    return sum(cell_len(text) for text, _ in line)


@given(shares, st.integers(8, 90), st.integers(1, 12), st.none() | st.integers(-3, 90))
def test_every_row_has_the_requested_width_and_the_newest_value_is_at_the_right(history, width, height, cursor) -> None:
    heading = ((" " * width, "title"),)
    lines = area(heading, history, style="bar", ceiling=100.0, width=width, height=height, cursor=cursor)
    assert [width_of(line) for line in lines] == [width] * (height + 1)
    drawn = ["".join(text for text, _ in line)[6:-1] for line in lines[1:]]
    shown = history[-columns_of(width) :] if columns_of(width) else []
    for column, value in enumerate(reversed(shown), start=1):
        place = columns_of(width) - column
        if place == cursor:
            continue
        eighths = sum(BLOCKS.index(row[place].replace(RAIL, " ")) for row in drawn)
        has_rail = value is None and any(one is not None for one in shown[: len(shown) - column])
        assert (drawn[-1][place] == RAIL) == has_rail
        assert (eighths == 0) == (value is None)
        assert value is None or abs(eighths - max(1, value * 8 * height)) <= 1


def test_the_axis_labels_its_ends_and_if_there_is_space_its_middle() -> None:
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
    assert side_by_side(left, right, 2) == [(("aaa", "text"), ("  ", "text"), ("bbb", "text"))]
    assert time_axis("last 1 h", "now", 30, 0)[0][0] == "      last 1 h            now "


def test_the_time_axis_and_a_heading_mark_ages_at_their_columns_where_they_fit() -> None:
    width, step_s = 67, 1.0  # 60 columns from cell 6 to cell 65
    span_s = columns_of(width) * step_s
    (axis, _), *_ = time_axis("last 1 min", "now", width, span_s)
    assert axis[6 + 60 - 30 :].startswith("╵30 s")
    assert axis.endswith(" now ")
    *_, (marks, style) = with_marks(((" Memory 3 GiB", "title"),), width, span_s)
    assert style == "dim"
    assert (" Memory 3 GiB" + marks)[6 + 60 - 10 :].startswith("╷10 s")
    assert len(" Memory 3 GiB" + marks) == width
    assert with_marks((("x" * width, "title"),), width, span_s)[-1][0] == ""
    assert "╵2 days" in time_axis("last 7 days", "now", 100, 7 * 86400)[0][0]


def test_rails_are_drawn_in_the_gaps_of_every_quantity_from_the_first_value_of_any() -> None:
    busy, memory = [0.5, 0.5, None, 0.5], [None, 0.5, None, 0.5]
    for history, rails in ((busy, [2]), (memory, [0, 2])):
        *_, last = area((("x", "title"),), history, style="memory", ceiling=1.0, width=11, height=2, others=busy)
        row, style = last[1]
        assert [place for place, char in enumerate(row) if char == RAIL] == rails
        assert style.endswith(" rail")
