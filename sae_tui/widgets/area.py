"""A history as an area over a fixed axis: one column for each interval, the newest at the right."""

from __future__ import annotations

from collections.abc import Sequence

from sae_tui.format import count, fit, tall_sparkline
from sae_tui.widgets.lines import Line

_AXIS = 5  # cells for the numbers left of the plot
_TALL = 5  # rows from which the axis has its middle


def area(
    heading: Line, history: Sequence[float | None], *, style: str, ceiling: float | None, width: int, height: int
) -> list[Line]:
    """Return the heading and `height` rows below it, of `width` cells each.

    `history` is in shares, 0 to 1, of `ceiling`, with which the axis ends; None leaves a gap.
    """
    rows = tall_sparkline(history, max(0, width - _AXIS - 2), height, 1.0)
    body: list[Line] = [
        ((fit(label, _AXIS, right=True) + ("┤" if label else "│"), "dim"), (row, style), (" ", "text"))
        for label, row in zip(_axis(ceiling, height), rows, strict=True)
    ]
    return [heading, *body]


def beside(left: Sequence[Line], right: Sequence[Line], gap: int) -> list[Line]:
    """Return two plots of the same height beside each other."""
    return [(*one, (" " * gap, "text"), *other) for one, other in zip(left, right, strict=True)]


def _axis(ceiling: float | None, height: int) -> list[str]:
    """Return a label for each row of an axis that begins with 0: its ends, and its middle where there is room."""
    if not ceiling:
        return [""] * height
    labels = [count(ceiling), *[""] * (height - 2), "0"][:height]
    if height >= _TALL and height % 2:
        labels[height // 2] = count(ceiling / 2)
    return labels
