"""All GPUs, as one or two lines each, or as a card view or a map of tiles in as many columns as fit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from textual.binding import Binding
from textual.events import Click, Resize
from textual.message import Message

from sae_tui.format import fit
from sae_tui.panels.gpu_cards import CardGrid, card_grid, card_lines
from sae_tui.panels.gpu_lines import gpu_lines
from sae_tui.panels.gpu_map import map_grid, map_lines
from sae_tui.panels.gpu_row import GpuRow
from sae_tui.widgets.lines import Line, LineView

Shape = Literal["lines", "cards", "map"]


class GpuPanel(LineView, can_focus=True):
    """Draws the GPUs as lines, a card view or a map, in a single widget, so that an update causes only one repaint.

    If not all GPUs fit, the last line shows how many GPUs are hidden above and below. While the panel has the focus,
    one GPU has the cursor.
    """

    BINDINGS = [
        Binding("up,k", "move(0, -1)", "Up", show=False),
        Binding("down,j", "move(0, 1)", "Down", show=False),
        Binding("left,h", "move(-1, 0)", "Left", show=False),
        Binding("right,l", "move(1, 0)", "Right", show=False),
        Binding("enter", "choose", "Open", id="gpus.open", tooltip="The GPU in full screen"),
    ]

    class Chosen(Message):
        """The user pressed Enter on a GPU or clicked it a second time."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def on_mount(self) -> None:
        self._cursor = 0  # index into the rows
        self._rows: tuple[GpuRow, ...] = ()
        self._shape: Shape = "lines"
        self._space = 0
        self._lines_each = 1
        self._first = 0

    def show_gpus(self, rows: Sequence[GpuRow], *, shape: Shape, space: int, lines_each: int = 1) -> None:
        """Draw the GPUs that fit into `space` lines, starting at the scroll position.

        If `shape` is "lines", each GPU has `lines_each` lines.
        """
        # If only a few GPUs fit as a card view, one line per GPU is more useful.
        is_crowded = shape == "cards" and len(rows) <= space < 2 * card_grid(len(rows), self.width, space).bands
        self._rows, self._shape = tuple(rows), "lines" if is_crowded else shape
        self._space, self._lines_each = space, lines_each
        self._draw()

    def show_words(self, words: str, style: str) -> None:
        """Show why there are no GPUs, wrapped into lines."""
        self._rows = ()
        self.show([((fit(f" {line}", self.width), style),) for line in self.wrapped(words, self.width)])

    @staticmethod
    def wrapped(words: str, width: int) -> list[str]:
        """Return the sentences wrapped to the width, each starting on a new line."""
        space = max(20, width - 2)
        return [line for each in words.splitlines() for line in textwrap.wrap(each, space, break_on_hyphens=False)]

    def scroll_gpus(self, pages: int) -> None:
        """Scroll down by `pages` pages, or up if the number is negative."""
        if self._rows:
            grid = self._grid()
            self._first += pages * grid.count_fitting(self._space) * grid.columns
            self._draw()

    def action_move(self, across: int, down: int) -> None:
        """Move the cursor, and scroll it into view."""
        if not self._rows:
            return
        grid = self._grid()
        self._cursor = max(0, min(len(self._rows) - 1, self._cursor + across + down * grid.columns))
        band, shown = self._cursor // grid.columns, grid.count_fitting(self._space)
        top = min(max(self._first // grid.columns, band - shown + 1), band)
        self._first = top * grid.columns
        self._draw()

    def action_choose(self) -> None:
        if self._cursor < len(self._rows):
            self.post_message(self.Chosen(self._rows[self._cursor].sample.index))

    def on_click(self, event: Click) -> None:
        grid, at = self._grid(), event.get_content_offset(self)
        if at is None:
            return
        column = min(grid.columns - 1, at.x // max(1, self.width // grid.columns))
        place = self._first + at.y // grid.height * grid.columns + column
        if place < len(self._rows):
            again, self._cursor = place == self._cursor, place
            self._draw()
            if again:
                self.action_choose()

    def on_focus(self) -> None:
        self._draw()

    def on_blur(self) -> None:
        self._draw()

    def on_mouse_scroll_down(self) -> None:
        self._scroll_by(1)

    def on_mouse_scroll_up(self) -> None:
        self._scroll_by(-1)

    def on_resize(self, _: Resize) -> None:
        if self._rows:
            self._draw()

    def _scroll_by(self, bands: int) -> None:
        if self._rows:
            self._first += bands * self._grid().columns
            self._draw()

    def _grid(self) -> CardGrid:
        if self._shape != "lines":
            grid_of = card_grid if self._shape == "cards" else map_grid
            return grid_of(len(self._rows), self.width, self._space)
        return CardGrid(1, self._lines_each, len(self._rows))

    def _draw(self) -> None:
        width = self.width
        if not width:
            return
        grid = self._grid()
        shown = grid.count_fitting(self._space)
        top = max(0, min(self._first // grid.columns, grid.bands - shown))
        self._first = top * grid.columns
        at = self._cursor if self.has_focus else None
        marked = [replace(row, has_cursor=True) if place == at else row for place, row in enumerate(self._rows)]
        rows = marked[self._first : (top + shown) * grid.columns]
        if self._shape == "lines":
            lines = gpu_lines(rows, self._rows, width, grid.height)
        else:
            lines = (card_lines if self._shape == "cards" else map_lines)(rows, width, grid)
        if shown < grid.bands:
            lines.append(_more(self._first, len(self._rows) - self._first - len(rows), width))
        self.show(lines)


def _more(above: int, below: int, width: int) -> Line:
    parts = [f"▲ {above} more" if above else "", f"▼ {below} more" if below else ""]
    return ((fit(f"   {'  '.join(filter(None, parts))}  (keys [ and ])", width), "accent"),)
