"""A history drawn as an area over a fixed axis: one column per interval, with the latest on the right."""

from __future__ import annotations

from collections.abc import Sequence

from sae_tui.format import count, fit, tall_sparkline
from sae_tui.widgets.lines import SHADES, Line, Span

_AXIS = 5  # width of the numbers to the left of the plot, in cells
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

    `history` contains values from 0 to 1, as shares of `ceiling`, the upper end of the axis. None leaves a gap, marked
    if the other quantity, `others`, has a value in the same column. `cursor` is a column to mark.
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
    return [(row, styles[n - 1 - place * n // len(rows)]) for place, row in enumerate(rows)]


def columns_of(width: int) -> int:
    """Return the number of history columns in an area `width` cells wide."""
    return max(0, width - _AXIS - 2)


def time_axis(begin: str, end: str, width: int) -> Line:
    """Return the time axis below areas `width` cells wide, labelled at both ends."""
    space = columns_of(width)
    return ((fit(" " * (_AXIS + 1) + begin + end.rjust(max(0, space - len(begin))), width), "dim"),)


def _marked(row: str, style: str, cursor: int | None) -> Line:
    if cursor is None or not 0 <= cursor < len(row):
        return ((row, style),)
    mark = row[cursor] if row[cursor] != " " else "│"
    return ((row[:cursor], style), (mark, "title"), (row[cursor + 1 :], style))


def beside(left: Sequence[Line], right: Sequence[Line], gap: int) -> list[Line]:
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
