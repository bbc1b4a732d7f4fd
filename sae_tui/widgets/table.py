"""A table with the cursor tied to a row's key, so that re-sorting never selects another row.

The built-in `DataTable.sort` keeps the cursor's index, so that "stop the selected job" would stop the wrong job.
"""

from __future__ import annotations

import bisect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len, set_cell_size
from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.reactive import reactive

from sae_tui.format import fit, visible
from sae_tui.widgets.lines import LazyLines, Line, LineView, Span


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, minimum width, whether it takes spare space, and its `drop` priority.

    The columns with the highest `drop` are dropped first, and columns with the same value together. `order` names the
    sort order of its values, if the rows can be sorted by the column. A growing column is at most `most` cells wide, if
    given; the growing columns after it take the rest.
    """

    title: str
    width: int
    right: bool = False
    grow: bool = False
    drop: int = 0
    order: str = ""
    most: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A row: a key unaffected by sorting, and one span per column.

    The cells at the indices in `spill` extend over the empty cells after them. The cursor skips headings.
    """

    key: str
    cells: tuple[Span, ...]
    spill: tuple[int, ...] = ()
    is_heading: bool = False


# The keys for every list with a cursor and an `action_move`.
MOVES = (
    Binding("up,k", "move(-1)", "Up", show=False),
    Binding("down,j", "move(1)", "Down", show=False),
    Binding("pageup", "move(-10)", "Page up", show=False),
    Binding("pagedown", "move(10)", "Page down", show=False),
    Binding("home", "move(-10000000)", "First", show=False),
    Binding("end", "move(10000000)", "Last", show=False),
)


_SHIFT = 20  # in cells


class KeyedTable(LineView, can_focus=True):
    """Rows of spans with a heading line, and a cursor that follows its row's key.

    The heading of the column with the order `sorted_by` ends with an arrow: ▼ if `is_falling`, with the largest
    values first, otherwise ▲. If `can_shift`, `action_shift` scrolls the growing columns sideways.
    """

    can_shift = False

    BINDINGS = [*MOVES]
    DEFAULT_CSS = "KeyedTable { height: 1fr; }"
    fixed_lines = 1

    cursor: reactive[str | None] = reactive(None)

    class Chosen(Message):
        """The user pressed Enter on a row or clicked the row under the cursor."""

        def __init__(self, table: KeyedTable, key: str) -> None:
            super().__init__()
            self.table = table
            self.key = key

        @property
        def control(self) -> KeyedTable:
            return self.table

    class HeadingChosen(Message):
        """The user clicked the heading of a column with an order."""

        def __init__(self, order: str) -> None:
            super().__init__()
            self.order = order

    def __init__(self, columns: Sequence[Column], *, empty: str | Sequence[Line] = "", id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.columns = tuple(columns)
        self.empty = empty
        self.rows: tuple[Row, ...] = ()
        self.was_moved = False  # True once the user has moved the cursor
        self._awaited: str | None = None
        self.sorted_by, self.is_falling = "", False
        self._left = 0  # number of cells of the growing columns hidden on the left

    def show_rows(self, rows: Sequence[Row]) -> None:
        """Replace the rows. The cursor stays on its key, or moves to the nearest row if the key is gone.

        If the cursor was in view, it stays in view, so that no key acts on a row that cannot be seen.
        """
        was_in_view = self._is_in_view(self._cursor_index())
        keys = [row.key for row in rows if not row.is_heading]
        if self._awaited in keys:
            self.cursor, self._awaited = self._awaited, None
            self.call_after_refresh(self._reveal)
        if self.cursor not in keys:
            before = self.rows[: self._cursor_index()]
            nearest = min(sum(not row.is_heading for row in before), len(keys) - 1)
            self.rows = tuple(rows)
            self.cursor = keys[nearest] if keys else None
        self.rows = tuple(rows)
        self._draw()
        if was_in_view and not self._is_in_view(self._cursor_index()):
            self.call_after_refresh(self._reveal)

    def select(self, key: str) -> None:
        """Put the cursor on a row, or wait until the row appears."""
        if any(row.key == key for row in self.rows):
            self.cursor = key
            self._reveal()
        else:
            self._awaited = key

    def action_move(self, by: int) -> None:
        if not self.rows:
            return
        places = [place for place, row in enumerate(self.rows) if not row.is_heading]
        if not places:
            return
        self.was_moved = True
        at = bisect.bisect_left(places, self._cursor_index())
        index = places[max(0, min(len(places) - 1, at + by))]
        self.cursor = self.rows[index].key
        self._reveal()

    def _reveal(self) -> None:
        """Scroll as little as needed to show the row under the cursor."""
        if not self.rows:
            return
        index, visible = self._cursor_index(), self.size.height - 1
        if all(row.is_heading for row in self.rows[index + 1 :]):
            index = len(self.rows) - 1  # show the notes below the last row too
        if not self._is_in_view(index):
            top = round(self.scroll_y)
            self.scroll_to(y=index if index < top else index - visible + 1, animate=False)

    def _is_in_view(self, index: int) -> bool:
        top = round(self.scroll_y)
        return top <= index < top + self.size.height - 1

    def on_key(self, event: events.Key) -> None:
        if event.key == "enter" and self.cursor is not None:
            event.stop()
            self.post_message(self.Chosen(self, self.cursor))

    def action_shift(self, direction: int) -> None:
        """Scroll the growing columns sideways by a step, as far as their longest text."""
        self._left = max(0, self._left + direction * _SHIFT)
        self._draw()

    @property
    def shows_order(self) -> bool:
        """Whether the column that the rows are sorted by is shown."""
        return any(one.order == self.sorted_by for one in fit_columns(self.columns, self.size.width))

    def _hidden(self, widths: Mapping[Column, int]) -> int:
        """Return how many cells of the growing columns' longest text do not fit, or 0 if they cannot shift."""
        growing = [(place, widths[one]) for place, one in enumerate(self.columns) if one.grow and one in widths]
        if not self.can_shift:
            return 0
        return max(
            (cell_len(visible(row.cells[place][0])) - width for row in self.rows for place, width in growing), default=0
        )

    def _headings(self, hidden: int) -> list[Span]:
        arrow = "▼" if self.is_falling else "▲"
        before, after = "← " if self._left else "", " →" if hidden > self._left else ""
        return [
            (
                f"{before if one.grow else ''}{one.title}"
                f"{arrow if one.order and one.order == self.sorted_by else ''}{after if one.grow else ''}",
                "label",
            )
            for one in self.columns
        ]

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        if at is not None and at.y == 0:
            self._choose_heading(at.x)
            return
        row = -1 if at is None else at.y - 1 + round(self.scroll_y)
        if at is not None and at.y >= 1 and row < len(self.rows) and not self.rows[row].is_heading:
            again, self.was_moved = self.cursor == self.rows[row].key, True
            self.cursor = self.rows[row].key
            if again:
                self.post_message(self.Chosen(self, self.rows[row].key))

    def _choose_heading(self, x: int) -> None:
        for column, width in fit_columns(self.columns, self.size.width).items():
            if 0 <= x < width + 1 and column.order:
                self.post_message(self.HeadingChosen(column.order))
            x -= width + 1

    def watch_cursor(self) -> None:
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def on_focus(self) -> None:
        self._draw()

    def on_blur(self) -> None:
        self._draw()

    def _cursor_index(self) -> int:
        return next((index for index, row in enumerate(self.rows) if row.key == self.cursor), 0)

    def _draw(self) -> None:
        if not self.size.width:
            return
        widths = fit_columns(self.columns, self.size.width)
        hidden = self._hidden(widths)
        self._left = max(0, min(self._left, hidden))
        heading = _line(widths, self._headings(hidden), self.columns)
        if self.rows or not self.empty:
            # Bind the current rows and the current cursor, because both may change before a line is redrawn.
            marks = {self.cursor: "cursor" if self.has_focus else "here"}
            rows, columns, left = self.rows, self.columns, self._left

            def line(index: int) -> Line:
                return _row_line(_shifted(rows[index - 1], columns, left), widths, columns, marks) if index else heading

            self.show(LazyLines(1 + len(rows), line))
            return
        self.show([heading, *_indented(self.empty, self.size.width)])


def _indented(empty: str | Sequence[Line], width: int) -> list[Line]:
    """Return the lines shown instead of rows: unchanged if they fit, otherwise wrapped."""
    space = max(10, width - 2)
    lines: list[Line] = [((text, "dim"),) for text in empty.splitlines()] if isinstance(empty, str) else list(empty)
    found: list[Line] = []
    for line in lines:
        whole = "".join(text for text, _ in line)
        if cell_len(whole) <= space:
            found.append((("  ", "text"), *line, (" " * (space - cell_len(whole)), "text")))
        else:
            found += [((fit(f"  {text}", width), "dim"),) for text in textwrap.wrap(whole, space)]
    return found


def fit_columns(columns: Sequence[Column], width: int) -> dict[Column, int]:
    """Return the widths of the columns that fit; drop the least important ones, and widen the growing columns."""
    fitting = list(columns)
    while sum(column.width + 1 for column in fitting) > width and any(column.drop for column in fitting):
        least = max(column.drop for column in fitting)
        fitting = [column for column in fitting if column.drop != least]
    spare = max(0, width - sum(column.width + 1 for column in fitting))
    widths = {column: column.width for column in fitting}
    for column in fitting:
        if column.grow:
            more = min(spare, column.most - column.width) if column.most else spare
            widths[column] += more
            spare -= more
    return widths


def _shifted(row: Row, columns: Sequence[Column], left: int) -> Row:
    """Return the row with its growing texts shifted left by `left` cells; an ellipsis replaces the hidden part."""
    if not left:
        return row
    cells = [
        (f"…{_without(text, left + 1)}" if column.grow and text else text, style)
        for (text, style), column in zip(row.cells, columns, strict=True)
    ]
    return replace(row, cells=tuple(cells))


def _without(text: str, n_cells: int) -> str:
    """Return the text without its first `n_cells` cells; a wide character cut in half leaves a space."""
    text = visible(text)
    rest = text[len(set_cell_size(text, n_cells)) :]
    return " " * (cell_len(text) - n_cells - cell_len(rest)) + rest


def _row_line(row: Row, widths: dict[Column, int], columns: Sequence[Column], marks: Mapping[str | None, str]) -> Line:
    line = _line(widths, row.cells, columns, row.spill)
    mark = marks.get(row.key)
    return tuple((text, f"{style} {mark}") for text, style in line) if mark else line


def _line(
    widths: dict[Column, int], cells: Sequence[Span], columns: Sequence[Column], spill: Sequence[int] = ()
) -> Line:
    spans: list[Span] = []
    taken = 0
    for place, (column, (text, style)) in enumerate(zip(columns, cells, strict=True)):
        if place < taken:
            continue
        width = widths.get(column, -1)
        if place in spill:
            taken = next((later for later in range(place + 1, len(cells)) if cells[later][0]), len(cells))
            width = sum(widths[other] + 1 for other in columns[place:taken] if other in widths) - 1
        if width >= 0:
            spans.append((fit(text, width, right=column.right and place not in spill) + " ", style))
    return tuple(spans)
