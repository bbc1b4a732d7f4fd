from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.widgets import Static

from sae_tui.widgets import table
from sae_tui.widgets.chart import legend
from sae_tui.widgets.lines import LazyLines, Line
from sae_tui.widgets.menu import Menu, Words
from sae_tui.widgets.plot import braille, round_axis, y_range
from sae_tui.widgets.table import Column, KeyedTable, Row


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.floats(-5, 5)), min_size=1, max_size=60, unique_by=lambda p: p[0]),
    st.integers(2, 40),
    st.integers(1, 10),
)
def test_every_point_on_a_curve_is_a_dot_in_its_cell(points: list, width: int, height: int) -> None:
    points.sort()
    low, high = y_range([y for _, y in points], from_zero=False)
    rows = braille(points, width, height, low, high)
    assert [len(row) for row in rows] == [width] * height
    first, last = points[0][0], points[-1][0]
    for x, y in points:
        column = round((x - first) / (last - first) * (2 * width - 1)) // 2 if last > first else width - 1
        row = round((high - y) / (high - low) * (4 * height - 1)) // 4
        assert rows[row][column] != "\u2800"


def test_a_flat_curve_has_a_margin_and_zero_stays_the_lower_bound() -> None:
    assert y_range([5.0, 5.0], from_zero=False) == (4.5, 5.5)
    assert y_range([0.2, 0.4], from_zero=True) == (0.0, 0.4)
    low, high = y_range([0.0, 0.0], from_zero=True)
    assert low == 0.0 < high


class TableApp(App[None]):
    def compose(self) -> ComposeResult:
        columns = (
            Column("ID", 4),
            Column("NAME", 8, grow=True),
            Column("MORE", 10, drop=1),
            Column("MOST", 10, drop=2),
        )
        yield KeyedTable(columns, empty="nothing here")


def rows(*keys: str) -> list[Row]:
    return [Row(key, ((key, "text"), (f"name {key}", "text"), ("more", "dim"), ("most", "dim"))) for key in keys]


async def test_the_cursor_follows_its_row_through_sorting_and_moves_on_if_it_is_removed() -> None:
    app = TableApp()
    async with app.run_test(size=(60, 10)) as pilot:
        table = app.query_one(KeyedTable)
        table.focus()
        table.show_rows(rows("a", "b", "c", "d"))
        await pilot.press("down", "down")
        assert table.cursor == "c"
        table.show_rows(rows("d", "c", "b", "a"))
        assert table.cursor == "c"
        table.show_rows(rows("d", "b", "a"))
        assert table.cursor == "b"
        table.show_rows([])
        assert table.cursor is None
        assert "nothing here" in table.plain


async def test_the_cursor_stays_visible_in_a_long_list() -> None:
    app = TableApp()
    async with app.run_test(size=(60, 10)) as pilot:
        table = app.query_one(KeyedTable)
        table.focus()
        table.show_rows(rows(*map(str, range(100))))
        await pilot.pause()
        await pilot.press("end")
        await pilot.pause()
        bottom = "".join(segment.text for segment in table.render_line(9))
        assert "name 99" in bottom
        heading = "".join(segment.text for segment in table.render_line(0))
        assert "NAME" in heading
        await pilot.press("home")
        await pilot.pause()
        assert "name 0" in "".join(segment.text for segment in table.render_line(1))


async def test_the_cursor_stays_visible_if_rows_are_added_above_it_unless_the_user_has_scrolled_away() -> None:
    app = TableApp()
    async with app.run_test(size=(40, 6)) as pilot:
        shown = app.query_one(KeyedTable)
        shown.show_rows(rows("a", "b", "c"))
        await pilot.pause()
        shown.show_rows(rows("n3", "n2", "n1", "n0", "z9", "z8", "a", "b", "c"))
        await pilot.pause()
        assert (shown.cursor, shown.scroll_y) == ("a", 2)
        shown.scroll_to(y=0, animate=False)
        await pilot.pause()
        shown.show_rows(rows("n4", "n3", "n2", "n1", "n0", "z9", "z8", "a", "b", "c"))
        await pilot.pause()
        assert (shown.cursor, shown.scroll_y) == ("a", 0)


async def test_columns_are_dropped_in_order_and_nothing_wraps() -> None:
    for width, titles in ((60, {"ID", "NAME", "MORE", "MOST"}), (30, {"ID", "NAME", "MORE"}), (16, {"ID", "NAME"})):
        app = TableApp()
        async with app.run_test(size=(width, 10)) as pilot:
            table = app.query_one(KeyedTable)
            table.show_rows(rows("a"))
            await pilot.pause()
            assert set(table.plain.splitlines()[0].split()) == titles


class ShiftedTable(KeyedTable):
    BINDINGS = [("right", "shift(1)"), ("left", "shift(-1)")]
    can_shift = True


class ShiftedApp(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.orders: list[str] = []

    def compose(self) -> ComposeResult:
        columns = Column("ID", 4, order="id"), Column("NAME", 10, grow=True, order="name"), Column("X", 4)
        yield ShiftedTable(columns)

    def on_keyed_table_heading_chosen(self, event: KeyedTable.HeadingChosen) -> None:
        self.orders.append(event.order)


async def test_long_cells_scroll_sideways_up_to_their_end_with_marks_where_text_is_hidden() -> None:
    app = ShiftedApp()
    async with app.run_test(size=(40, 10)) as pilot:
        table = app.query_one(KeyedTable)
        table.focus()
        alphabet = "".join(map(chr, range(ord("A"), ord("Z") + 1))) * 3
        table.show_rows([Row(key, ((key, "text"), (name, "text"), ("x", "text"))) for key, name in
                         (("1", alphabet), ("2", "short"))])  # fmt: skip
        await pilot.pause()
        assert "NAME →" in table.plain
        assert "← " not in table.plain
        await pilot.press("right")
        heading, long, short = table.plain.splitlines()
        assert "← NAME →" in heading
        assert "…VWXYZABC" in long
        assert "short" not in short
        await pilot.press("right", "right", "right", "right")
        heading, long, _ = table.plain.splitlines()
        assert "← NAME " in heading
        assert "→" not in heading
        assert long.rstrip().endswith("XYZ x")
        await pilot.press("left", "left", "left", "left", "left")
        assert "NAME →" in table.plain
        table.show_rows([])
        assert "→" not in table.plain


async def test_wide_and_unprintable_characters_scroll_sideways_by_the_cells_that_they_take() -> None:
    app = ShiftedApp()
    async with app.run_test(size=(40, 10)) as pilot:
        table = app.query_one(KeyedTable)
        table.focus()
        table.show_rows([Row("1", (("1", "text"), ("字" * 30 + "\t" * 3 + "END", "text"), ("x", "text")))])
        await pilot.pause()
        await pilot.press("right")
        # The ellipsis and the space replace 21 cells and half of a character.
        assert f"… {'字' * 13}… x" in " ".join(table.plain.split())
        await pilot.press("right", "right", "right")
        heading, row = table.plain.splitlines()
        assert "→" not in heading
        assert row.rstrip().endswith("END x")


async def test_clicking_a_heading_requests_its_sort_order_and_the_current_one_has_an_arrow() -> None:
    app = ShiftedApp()
    async with app.run_test(size=(40, 10)) as pilot:
        table = app.query_one(KeyedTable)
        table.sorted_by, table.is_falling = "name", True
        table.show_rows([Row("1", (("1", "text"), ("a", "text"), ("x", "text")))])
        await pilot.pause()
        assert table.plain.splitlines()[0].split() == ["ID", "NAME▼", "X"]
        assert table.shows_order
        for x in (1, 12, 37):
            await pilot.click(KeyedTable, offset=(x, 0))
        await pilot.pause()
        assert app.orders == ["id", "name"]


async def test_columns_with_the_same_priority_are_dropped_together() -> None:
    columns = [Column("A", 8), Column("B", 4, drop=2), Column("C", 4, drop=2), Column("D", 4, drop=1)]
    assert [column.title for column in table.fit_columns(columns, 23)] == ["A", "D"]


def test_a_long_cell_extends_only_into_the_empty_cells_after_it() -> None:
    columns = [Column("A", 3), Column("B", 4), Column("C", 4, right=True), Column("D", 4)]
    widths = {column: column.width for column in columns}
    cells = tuple((text, "text") for text in ("one", "a long story", "", "end"))
    cell_text = "".join(text for text, _ in table._line(widths, cells, columns, spill=(1,)))
    assert cell_text == "one a long s… end  "
    del widths[columns[2]]
    cell_text = "".join(text for text, _ in table._line(widths, cells, columns, spill=(1,)))
    assert cell_text == "one a l… end  "


def test_lazy_lines_are_created_only_when_they_are_read() -> None:
    made: list[int] = []

    def make(index: int) -> Line:
        made.append(index)
        return ((str(index), "text"),)

    lines = LazyLines(1000, make)
    assert len(lines) == 1000
    assert lines[3] == (("3", "text"),)
    assert list(lines[998:]) == [(("998", "text"),), (("999", "text"),)]
    assert made == [3, 998, 999]
    with pytest.raises(IndexError):
        lines[1000]


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(1, 90), st.integers(1, 6))
def test_a_legend_fits_the_given_width_and_number_of_rows(lengths: list, width: int, most_rows: int) -> None:
    entries: list[Line] = [(("x" * length, "text"),) for length in lengths]
    rows = legend(entries, width, most_rows)
    assert len(rows) <= max(1, most_rows)
    assert all(sum(len(text) for text, _ in row) <= width for row in rows)


async def test_a_menu_shows_its_value_or_its_prompt_when_it_is_first_drawn() -> None:
    class TwoMenus(App[None]):
        def compose(self) -> ComposeResult:
            yield Menu([("one", 1), ("two", 2)], value=2, allow_blank=False)
            yield Menu([("one", 1)], prompt="pick one")

    app = TwoMenus()
    async with app.run_test():
        for menu, words in zip(app.query(Menu), ("two", "pick one"), strict=True):
            current = next(iter(menu.compose()))
            label = next(iter(current.compose()))
            assert isinstance(label, Static)
            assert str(label.content) == words
            assert str(menu.query_one("#label", Static).content) == words


@pytest.mark.parametrize("n_steps", [0, 1])
async def test_a_menu_can_be_removed_while_it_is_mounted(n_steps: int) -> None:
    app = App[None]()
    async with app.run_test() as pilot:
        menu = Menu([("one", 1), ("two", 2)], value=1, allow_blank=False)
        app.screen.mount(menu)
        for _ in range(n_steps):
            await asyncio.sleep(0)
        menu.remove()
        await pilot.pause()
        assert not app.query(Menu)


async def test_paging_through_a_menu_without_space_has_no_effect() -> None:
    class OneMenu(App[None]):
        def compose(self) -> ComposeResult:
            yield Menu([("one", 1), ("two", 2)], value=1, allow_blank=False, compact=True)

    app = OneMenu()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        words = app.query_one(Words)
        assert words.has_focus
        await pilot.press("pagedown", "enter")
        assert app.query_one(Menu).value == 2
        await pilot.press("enter")
        await pilot.resize_terminal(3, 1)
        words.styles.display = "none"
        await pilot.pause()
        words.action_page_down()
        words.action_page_up()


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(3, 60))
def test_an_axis_ends_at_round_numbers_beyond_the_values(low: float, span: float, rows: int) -> None:
    assume(span > 1e-6 * abs(low))
    first, last, ticks = round_axis(low, low + span, rows)
    assert first <= low + 1e-6 * span
    assert last >= low + span - 1e-6 * span
    assert sorted(ticks) == list(ticks)
    assert (min(ticks), max(ticks)) == (0, rows - 1)
    values = list(ticks.values())
    step = (values[0] - values[-1]) / (len(values) - 1)
    assert values == pytest.approx([last - place * step for place in range(len(values))], rel=1e-9, abs=1e-9 * step)
    leading = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(leading - factor) for factor in (1, 2, 2.5, 5)) < 1e-4


@pytest.mark.parametrize(("low", "high", "rows"), [(-1e308, 1e308, 9), (1e9, 1e9 + 1e-7, 9), (0.0, 1.0, 1)])
def test_an_axis_that_cannot_end_at_round_numbers_keeps_its_ends(low: float, high: float, rows: int) -> None:
    assert round_axis(low, high, rows) == (low, high, {rows - 1: low, 0: high})
