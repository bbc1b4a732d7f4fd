"""A text as a language model reads it: tokens wrapped to the width, each in its own style, with a cursor on one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, chop_cells
from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.reactive import reactive

from sae_tui.format import visible
from sae_tui.jobs.features import readable
from sae_tui.panels.latents import SHADE_STYLES
from sae_tui.widgets.lines import PALETTE, Line, LineView
from trainer.contract.printable import MARK

_LINES = re.compile(r"[^\n]*\n|[^\n]+")


class Piece(NamedTuple):
    """A token, or the part of a token in one row; `x` is its first cell."""

    token: int
    x: int
    text: str

    @property
    def end(self) -> int:
        return self.x + cell_len(self.text)


def wrapped(texts: Sequence[str], width: int) -> list[list[Piece]]:
    """Break tokens into rows of at most `width` cells; a row also ends after a line end, which is shown as ⏎.

    A token is broken only if it is wider than a row, or at a line end. A token without width is shown as a mark.
    """
    rows: list[list[Piece]] = [[]]
    for token, text in enumerate(texts):
        for part in _LINES.findall(text) or [""]:
            shown = visible(readable(part))
            for piece in chop_cells(shown, max(2, width)) if cell_len(shown) else [MARK]:
                x = rows[-1][-1].end if rows[-1] else 0
                if x and x + cell_len(piece) > width:
                    rows.append([])
                    x = 0
                rows[-1].append(Piece(token, x, piece))
            if part.endswith("\n"):
                rows.append([])
    return rows if rows[-1] else rows[:-1]


def styled(rows: Sequence[Sequence[Piece]], style: Callable[[int], str]) -> list[Line]:
    """Return rows as lines, with each token in its own style."""
    return [tuple((piece.text, style(piece.token)) for piece in row) for row in rows]


def quoted(text: str) -> str:
    """Return a token in quotes, so that its spaces can be seen."""
    return f'"{readable(text)}"'


class TokenText(LineView, can_focus=True):
    """Shows tokens with a cursor on one of them; posts `Moved` when the cursor moves, and `Chosen` on Enter."""

    BINDINGS = [
        Binding("left,h", "move(-1)", "Previous token", show=False),
        Binding("right,l", "move(1)", "Next token", show=False),
        Binding("up,k", "move_row(-1)", "Up", show=False),
        Binding("down,j", "move_row(1)", "Down", show=False),
        Binding("pageup", "move_row(-10)", "Page up", show=False),
        Binding("pagedown", "move_row(10)", "Page down", show=False),
        Binding("home", "move(-10000000)", "First token", show=False),
        Binding("end", "move(10000000)", "Last token", show=False),
    ]
    palette = PALETTE | SHADE_STYLES
    cursor: reactive[int] = reactive(0)

    class Moved(Message):
        """The cursor has moved to another token."""

    class Chosen(Message):
        """The user pressed Enter on the token under the cursor."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._texts: Sequence[str] = ()
        self._token_styles: Sequence[str] = ()
        self._rows: list[list[Piece]] = []
        self._titles: tuple[Line, str] = (), ""
        self._instead: Callable[[int], Sequence[Line]] | None = None

    def show_tokens(self, texts: Sequence[str], styles: Sequence[str], title: Line, hint: str = "") -> None:
        """Show tokens, each in its style; the cursor stays where it is if there still is a token."""
        self._texts, self._token_styles, self._titles, self._instead = texts, styles, (title, hint), None
        self.set_reactive(TokenText.cursor, min(self.cursor, max(0, len(texts) - 1)))
        self._draw()
        self._show_cursor()

    def show_instead(self, make: Callable[[int], Sequence[Line]], title: Line) -> None:
        """Show lines made for the width instead of tokens."""
        self._texts, self._titles, self._instead = (), (title, ""), make
        self.scroll_home(animate=False)
        self._draw()

    def action_move(self, by: int) -> None:
        self.cursor = max(0, min(len(self._texts) - 1, self.cursor + by))

    def action_move_row(self, by: int) -> None:
        if not self._texts:
            return
        row, x = self._place()
        there = max(0, min(len(self._rows) - 1, row + by))
        before = [piece for piece in self._rows[there] if piece.x <= x]
        if there != row and self._rows[there]:
            self.cursor = (before or self._rows[there])[-1 if before else 0].token

    def _place(self) -> tuple[int, int]:
        """Return the row and the first cell of the token under the cursor."""
        found = ((y, piece.x) for y, row in enumerate(self._rows) for piece in row if piece.token == self.cursor)
        return next(found, (0, 0))

    def watch_cursor(self) -> None:
        self._draw()
        self._show_cursor()
        self.post_message(self.Moved())

    def _show_cursor(self) -> None:
        line, seen, top = self._place()[0], max(1, self.size.height - self.fixed_lines), round(self.scroll_y)
        if not top <= line < top + seen:
            self.scroll_to(y=line if line < top else line - seen + 1, animate=False, force=True)

    def on_key(self, event: events.Key) -> None:
        if event.key == "enter" and self._texts:
            event.stop()
            self.post_message(self.Chosen())

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        y = -1 if at is None else at.y - self.fixed_lines + round(self.scroll_y)
        if at is not None and 0 <= y < len(self._rows):
            self.cursor = next((one.token for one in self._rows[y] if one.x <= at.x < one.end), self.cursor)

    def on_resize(self) -> None:
        self._draw()
        self._show_cursor()

    def on_focus(self) -> None:
        self._draw()

    def on_blur(self) -> None:
        self._draw()

    def _draw(self) -> None:
        width = self.size.width
        if not width:
            return
        if self._instead:
            self._rows = []
            self.show_titled(self._titles[0], self._instead(width))
            return
        self._rows = wrapped(self._texts, width)
        mark = "swapped" if self.has_focus else "here"

        def style(token: int) -> str:
            return f"{self._token_styles[token]} {mark}" if token == self.cursor else self._token_styles[token]

        self.show_titled(self._titles[0], styled(self._rows, style), self._titles[1])
