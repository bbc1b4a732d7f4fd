from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from sae_tui import format as say
from trainer.contract import wording


@given(st.text(max_size=40), st.integers(0, 30), st.booleans())
def test_fit_returns_text_of_exactly_the_given_width_without_control_characters(
    text: str, width: int, right: bool
) -> None:
    fitted = say.fit(text, width, right=right)
    assert cell_len(fitted) == width
    assert fitted.isprintable() or not fitted


@given(st.lists(st.none() | st.floats(0, 100), max_size=50), st.integers(0, 40))
def test_a_sparkline_has_one_column_per_sample_on_a_fixed_axis(values: list, width: int) -> None:
    line = say.sparkline(values, width, 100)
    assert len(line) == width
    for char, value in zip(line[::-1], values[::-1][:width], strict=False):
        assert (char == " ") == (value is None)
        if value is not None:
            assert abs(say.BLOCKS.index(char) / 8 * 100 - value) <= 12.5


def test_a_sparklines_axis_does_not_depend_on_its_data() -> None:
    assert say.sparkline([98, 99, 98], 3, 100) == "███"
    assert say.sparkline([1, 2, 1], 3, 100) == "▁▁▁"


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.integers(1, 4))
def test_a_tall_sparkline_fills_eighths_in_proportion_to_the_value(values: list, height: int) -> None:
    rows = say.tall_sparkline(values, len(values), height, 100)
    for column, value in enumerate(values):
        eighths = sum(say.BLOCKS.index(row[column]) for row in rows)
        assert abs(eighths - max(1, value / 100 * 8 * height)) <= 1


@pytest.mark.parametrize(
    ("fraction", "expected"), [(None, "    "), (0, "────"), (0.4, "━╸──"), (1, "━━━━"), (7, "━━━━"), (-1, "────")]
)
def test_a_bar_is_clamped_to_its_range_and_empty_if_the_value_is_unknown(fraction, expected) -> None:
    assert say.bar(fraction, 4) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, "–"),
        (float("inf"), "–"),
        (5, "5 s"),
        (89, "89 s"),
        (720, "12 min"),
        (11_100, "3 h 05"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations_have_a_short_readable_form(seconds, expected) -> None:
    assert say.duration(seconds) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"),
        (0, "0"),
        (950, "950"),
        (9999, "9999"),
        (12_345, "12.3k"),
        (4e6, "4.0M"),
        (9999.6, "10.0k"),
        (999_949, "999.9k"),
        (999_960, "1.0M"),
        (999_960_000, "1.0G"),
        (-999_960, "-1.0M"),
    ],
)
def test_large_counts_are_shortened_with_a_unit_letter(value, expected) -> None:
    assert say.count(value) == expected


def test_only_complete_progress_is_100_percent() -> None:
    assert [wording.done(progress) for progress in (0.0, 0.29, 0.994, 0.9999, 1.0)] == [
        "0%",
        "29%",
        "99%",
        "99%",
        "100%",
    ]
    assert [wording.share(part) for part in (0.0, 1e-5, 0.125, 0.9994, 0.99996, 1.0)] == [
        "0%", "<0.1%", "12.5%", "99.9%", ">99.9%", "100%",
    ]  # fmt: skip


def test_a_gap_in_a_sparkline_is_marked_if_another_quantity_is_known_at_that_time():
    others = [None, 0.5, 0.5, 0.5, None, 0.5]
    assert say.tall_sparkline([None, 1, None, None, None, 1], 6, 2, 1.0, others) == [" █   █", " █───█"]
    assert say.tall_sparkline([None] * 6, 6, 1, 1.0, others) == [" " * 6]
    assert say.tall_sparkline([None, 1], 4, 1, 1.0, [1, 1]) == ["  ─█"]
    assert say.tall_sparkline([None, 1], 4, 1, None, [1, 1]) == ["    "]
