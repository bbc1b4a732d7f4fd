"""A history drawn as an area over a fixed axis: one column per interval, with the latest on the right."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from sae_tui.format import RAIL, count, fit, tall_sparkline
from sae_tui.theme import SHADES
from sae_tui.widgets.lines import Line, Span

_AXIS = 5  # width of the numbers to the left of the plot, in cells
# The ages that the time axis marks, in seconds, each with its label.
_MARKS = {
    5: "5 s", 10: "10 s", 30: "30 s", 60: "60 s", 120: "120 s", 300: "5 min", 600: "10 min", 1800: "30 min",
    3600: "1 h", 7200: "2 h", 6 * 3600: "6 h", 12 * 3600: "12 h", 86400: "1 day", 2 * 86400: "2 days",
    7 * 86400: "7 days", 30 * 86400: "30 days",
}  # fmt: skip
_MARKS_FROM = 10  # ages below the history's span divided by this are not marked
_DOWN, _UP = "╷", "╵"
_TALL = 5  # minimum height at which the middle of the axis is labelled


def area(
    heading: Line,
    history: Sequence[float | None],
    *,
    style: str,
    ceiling: float | None,
    width: int,
    height: int,
    cursor: int | None = None,
    others: Sequence[float | None] = (),
) -> list[Line]:
    """Return the heading and, below it, `height` rows of `width` cells each.

    `history` contains values from 0 to 1, as shares of `ceiling`, the upper end of the axis. None leaves a gap, which
    is drawn as a rail after the first value in the history or in `others`, another quantity. `cursor` is a column to
    mark.
    """
    rows = tall_sparkline(history, columns_of(width), height, 1.0, others)
    body: list[Line] = [
        (
            (fit(label, _AXIS, right=True) + ("┤" if label else "│"), "dim"),
            *_marked(row, shade, cursor),
            (" ", "text"),
        )
        for label, (row, shade) in zip(_axis(ceiling, height), shaded(rows, style), strict=True)
    ]
    return [heading, *body]


def shaded(rows: Sequence[str], style: str) -> list[Span]:
    """Return the rows of a history from top to bottom, each in a shade of the style; lower rows are darker."""
    n = len(SHADES) + 1
    styles = [*(f"{style}-{shade}" for shade in SHADES), style]
    named = [(row, styles[n - 1 - place * n // len(rows)]) for place, row in enumerate(rows)]
    return [(row, f"{style} rail" if RAIL in row else style) for row, style in named]


def columns_of(width: int) -> int:
    """Return the number of history columns in an area `width` cells wide."""
    return max(0, width - _AXIS - 2)


def time_axis(begin: str, end: str, width: int, span_s: float) -> Line:
    """Return the time axis below areas `width` cells wide, labelled at both ends, with marks between them."""
    first = " " * (_AXIS + 1) + begin
    last = f" {end} "
    return ((fit(first + _ruler(_UP, len(first), width - len(last), width, span_s) + last, width), "dim"),)


def with_marks(heading: Line, width: int, span_s: float) -> Line:
    """Return the heading of an area, with marks over the columns that are 30 s, 60 s and so on before the end."""
    used = sum(cell_len(text) for text, _ in heading)
    return (*heading, (_ruler(_DOWN, used, width, width, span_s), "dim"))


def _ruler(tick: str, begin: int, end: int, width: int, span_s: float) -> str:
    """Return the marks of a time axis from cell `begin` to cell `end` of an area; marks that do not fit are left out.

    Labels are to the right of their ticks.
    """
    text = ""
    for age_s, label in reversed(_MARKS.items()):
        if not span_s / _MARKS_FROM < age_s <= span_s:
            continue
        at, mark = _AXIS + 1 + round(columns_of(width) * (1 - age_s / span_s)) - begin, tick + label
        if len(text) < at and at + len(mark) <= end - begin:
            text = text.ljust(at) + mark
    return text.ljust(end - begin)


def _marked(row: str, style: str, cursor: int | None) -> Line:
    if cursor is None or not 0 <= cursor < len(row):
        return ((row, style),)
    mark = row[cursor] if row[cursor] != " " else "│"
    return ((row[:cursor], style), (mark, "title"), (row[cursor + 1 :], style))


def side_by_side(left: Sequence[Line], right: Sequence[Line], gap: int) -> list[Line]:
    """Return two plots of the same height side by side."""
    return [(*one, (" " * gap, "text"), *other) for one, other in zip(left, right, strict=True)]


def _axis(ceiling: float | None, height: int) -> list[str]:
    """Return a label for each row of an axis starting at 0: at its ends, and in the middle if it fits."""
    if not ceiling:
        return [""] * height
    labels = [count(ceiling), *[""] * (height - 2), "0"][:height]
    if height >= _TALL and height % 2:
        labels[height // 2] = count(ceiling / 2)
    return labels
