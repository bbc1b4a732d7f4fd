"""A plot of several curves or points as text, each with a glyph and colour."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from rich.cells import cell_len

from sae_tui.format import fit
from sae_tui.widgets.lines import PALETTE, Line, LineView, Span, cut

# Colours repeat after eight curves, glyphs after 34.
GLYPHS = "●▲■◆○△□◇abcdefghijklmnopqrstuvwxyz"
AXIS = 9  # width of the numbers to the left of the plot, and of its edge, in cells
_COLOURS = ("$primary", "$warning", "$success", "$error", "$secondary", "$accent", "$foreground", "$text-muted")
_BLANK, _BRAILLE = " ", 0x2800


class Chart(LineView):
    """A `LineView` with a style for each curve."""

    palette = PALETTE | {f"curve{number}": colour for number, colour in enumerate(_COLOURS)}
    DEFAULT_CSS = """
    Chart { height: 1fr; width: 1fr; min-height: 3; }
    """


def glyph(number: int) -> Span:
    """Return a curve's glyph, in its colour."""
    return GLYPHS[number % len(GLYPHS)], f"curve{number % len(_COLOURS)}"


class Canvas:
    """A grid of cells where later drawings cover earlier ones."""

    def __init__(self, width: int, height: int) -> None:
        self._cells: list[list[Span]] = [[(_BLANK, "text")] * width for _ in range(height)]

    def draw(self, rows: Sequence[str], style: str) -> None:
        """Draw braille over existing cells.

        A cell with two curves gets the dots from both, in the later curve's colour.
        """
        for cells, row in zip(self._cells, rows, strict=True):
            for x, char in enumerate(row):
                if ord(char) > _BRAILLE:
                    below = ord(cells[x][0])
                    bits = ord(char) | (below if _BRAILLE <= below < _BRAILLE + 256 else 0)
                    cells[x] = (chr(bits), style)

    def put(self, x: int, y: int, span: Span) -> None:
        self._cells[y][x] = span

    def rows(self) -> list[Line]:
        return [
            tuple(
                ("".join(char for char, _ in run), style) for style, run in itertools.groupby(row, key=lambda c: c[1])
            )
            for row in self._cells
        ]


def frame(rows: Sequence[Line], labels: Mapping[int, str]) -> list[Line]:
    """Return the rows with a y axis on the left; `labels` maps row numbers to their labels."""
    return [
        ((fit(labels.get(at, ""), AXIS - 1, right=True) + ("┤" if at in labels else "│"), "dim"), *row)
        for at, row in enumerate(rows)
    ]


def legend(entries: Sequence[Line], width: int, most_rows: int) -> list[Line]:
    """Return the entries in as many columns as fit; if there are too many rows, the last says how many are missing."""
    longest = max((_length(entry) for entry in entries), default=0)
    columns = max(1, min((width + 1) // (longest + 3), len(entries)))
    each = max(1, width // columns)
    rows = [_row(entries[at : at + columns], each) for at in range(0, len(entries), columns)]
    if len(rows) <= most_rows:
        return rows
    shown = rows[: max(0, most_rows - 1)]
    return [*shown, ((fit(f" and {len(entries) - len(shown) * columns} more", width), "dim"),)]


def _row(entries: Sequence[Line], each: int) -> Line:
    spans: list[Span] = []
    for entry in entries:
        shown = cut(_squeeze(((" ", "text"), *entry), each), each)
        spans += [*shown, (" " * (each - _length(shown)), "text")]
    return tuple(spans)


def _squeeze(entry: Line, width: int) -> Line:
    """Truncate an entry to `width` cells. Only its longest part, the name, is shortened; the values are kept."""
    excess = _length(entry) - width
    longest = max(range(len(entry)), key=lambda place: cell_len(entry[place][0]))
    text, style = entry[longest]
    if excess <= 0 or cell_len(text) <= excess:
        return entry
    return (*entry[:longest], (fit(text, cell_len(text) - excess), style), *entry[longest + 1 :])


def _length(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)
