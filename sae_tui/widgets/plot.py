"""A line plot in braille, with 2 x 4 dots per cell, on an axis with round numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from textual.events import Resize

from sae_tui.format import UNKNOWN, count, fit, number
from sae_tui.widgets.lines import Line, LineView

# The braille character bit for a dot at (column, row) in its 2 x 4 cell.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_AXIS = 8  # width of the numbers to the left of the plot, in cells
_MOST_STEPS, _ROUND = 4, (1.0, 2.0, 5.0)
_LABEL = 9  # minimum distance between two labels below a plot, in cells
_NEAR = 1e-9  # allowed relative rounding error between a sum of floats and a round number
_BLANK = chr(0x2800)  # a braille character without dots


class Plot(LineView):
    """A series over steps, as (x, y) points; with `from_zero`, the y axis starts at 0, to show absolute size.

    The axis reaches at least `least_top`, so that small values look small; `word` formats a value. `x_name` is what the
    x axis counts, and `x_word` formats it.
    """

    x_name = "step"

    DEFAULT_CSS = "Plot { height: 1fr; width: 1fr; min-height: 3; }"

    def __init__(
        self,
        title: str,
        *,
        from_zero: bool = False,
        least_top: float = -math.inf,
        word: Callable[[float | None], str] = number,
        id: str | None = None,  # noqa: A002
    ) -> None:
        super().__init__(id=id)
        self.plot_title = title
        self.from_zero = from_zero
        self.least_top = least_top
        self.word = word
        self.x_word: Callable[[float], str] = count
        self._points: tuple[tuple[float, float], ...] = ()
        self._behind: tuple[tuple[float, float], ...] = ()
        self._span: tuple[float, float] | None = None
        self._note, self._nothing = "", "no values yet"
        self._cursor: float | None = None

    def show_points(
        self,
        points: Sequence[tuple[float, float | None]],
        note: str = "",
        nothing: str = "no values yet",
        cursor: float | None = None,
        behind: Sequence[tuple[float, float | None]] = (),
        span: tuple[float, float] | None = None,
    ) -> None:
        """Draw the finite points of a series, oldest first; `note` is shown after the latest value.

        If `cursor` is a step, the value at that step is shown instead of the latest value. The points `behind` form a
        second curve, drawn dim on the same axes. `span` is the range of steps; the default is the range of the points.
        """
        self._note, self._nothing, self._cursor, self._span = note, nothing, cursor, span
        self._points, self._behind = _finite(points), _finite(behind)
        self._draw()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width, height = self.size.width - _AXIS - 1, self.size.height - (1 if self.has_title else 2)
        if not (self._points or self._behind):
            self.show_titled(self._heading(), [((fit(f"  {self._nothing}", self.size.width), "dim"),)])
        elif width < 2 or height < 1:
            self.show_titled(self._heading(), [])
        else:
            self.show_titled(self._heading(), self._plotted(width, height))

    def _plotted(self, width: int, height: int) -> list[Line]:
        """Return the curve with its y axis in `width` x `height` cells, and the x axis below it."""
        values = [y for _, y in (*self._points, *self._behind)]
        low, high = y_range(values, from_zero=self.from_zero, least_top=self.least_top)
        low, high, ticks = round_axis(low, high, height)
        front, back = (
            braille(points, width, height, low, high, self._steps) if points else [_BLANK * width] * height
            for points in (self._points, self._behind)
        )
        labels = [self.word(ticks[row]) if row in ticks else "" for row in range(height)]
        body: list[Line] = [
            ((fit(label, _AXIS, right=True) + ("┤" if label else "│"), "dim"), *self._row(*rows))
            for label, rows in zip(labels, zip(front, back, strict=True), strict=True)
        ]
        foot = " " * (_AXIS + 1) + x_axis(self._steps, self.x_name, width, self.x_word)
        return [*body, ((fit(foot, self.size.width), "dim"),)]

    @property
    def _steps(self) -> tuple[float, float]:
        """The first and last step of the axis."""
        xs = [x for points in (self._points, self._behind) if points for x in (points[0][0], points[-1][0])]
        return self._span or (min(xs), max(xs))

    def _row(self, front: str, back: str) -> Line:
        """Return a row of the plot: the curve, the background curve in cells without the curve, and the cursor."""
        cells = [(back[at], "dim") if cell == _BLANK else (cell, "spark") for at, cell in enumerate(front)]
        if self._cursor is not None:
            first, last = self._steps
            share = (self._cursor - first) / (last - first) if last > first else 1.0
            cells[round(max(0.0, min(1.0, share)) * (len(cells) - 1))] = ("│", "accent")
        runs = itertools.groupby(cells, key=lambda cell: "spark" if cell[0] == _BLANK else cell[1])
        return tuple(("".join(text for text, _ in run), style) for style, run in runs)

    def _value(self) -> str:
        """Return the latest value or, with a cursor, the last value up to the cursor and its step."""
        if self._cursor is not None and self._cursor < self._points[0][0]:
            return UNKNOWN
        if self._cursor is None:
            return self.word(self._points[-1][1])
        x, y = next(point for point in reversed(self._points) if point[0] <= self._cursor)
        return f"{self.word(y)} at {self.x_word(x)}"

    def _heading(self) -> Line:
        newest = f" {self._value()}" if self._points else ""
        note = f" · {self._note}" if self._note else ""
        return (self.plot_title, "title"), (newest, "accent"), (note, "dim")


def _finite(points: Sequence[tuple[float, float | None]]) -> tuple[tuple[float, float], ...]:
    return tuple((x, y) for x, y in points if y is not None and math.isfinite(y))


def y_range(values: Sequence[float], *, from_zero: bool, least_top: float = -math.inf) -> tuple[float, float]:
    """Return the axis range, reaching at least `least_top`.

    A flat series gets a margin above it and, unless the axis starts at 0, below it.
    """
    low, high = (0.0 if from_zero and min(values) >= 0 else min(values)), max(*values, least_top)
    if high > low:
        return low, high
    space = abs(high) * 0.1 or 1.0
    return (low if from_zero and low == 0 else low - space), high + space


def round_axis(low: float, high: float, rows: int) -> tuple[float, float, dict[int, float]]:
    """Return an axis with round ends, and the number to print at each labelled row (row 0 is the top)."""
    most = max(2, min(_MOST_STEPS, (rows - 1) // 2))
    if rows < 3 or not math.isfinite(high - low) or high - low < _NEAR * max(abs(high), abs(low)):
        return low, high, {rows - 1: low, 0: high}
    step = _round_step(low, high, most)
    first, last = math.floor(low / step + _NEAR), math.ceil(high / step - _NEAR)
    n_steps = max(1, last - first)
    return first * step, last * step, {round(n * (rows - 1) / n_steps): (last - n) * step for n in range(n_steps + 1)}


def _round_step(low: float, high: float, most: int) -> float:
    """Return a round step of which at most `most` fit between `low` and `high`, both widened to multiples of it."""
    exponent = math.floor(math.log10((high - low) / most))
    steps = (factor * 10.0**power for power in range(exponent, exponent + 3) for factor in _ROUND)
    for step in steps:
        if math.ceil(high / step - _NEAR) - math.floor(low / step + _NEAR) <= most:
            break
    return step


def round_span(low: float, high: float, width: int) -> tuple[float, float]:
    """Return the range of an x axis of `width` cells, widened to round numbers."""
    if not high > low:
        return low, high
    step = _round_step(low, high, max(2, width // _LABEL))
    return math.floor(low / step + _NEAR) * step, math.ceil(high / step - _NEAR) * step


def x_axis(span: tuple[float, float], name: str, width: int, word: Callable[[float], str] = count) -> str:
    """Return the line below a plot of `width` cells: round numbers below their columns, and the name at the end."""
    first, last = span
    line = [" "] * width
    if not (math.isfinite(last - first) and last > first):
        return fit(f"{word(last)} {name}", width, right=True)
    step = _round_step(first, last, max(2, width // _LABEL))
    step = max(1.0, step) if word is count else step
    end = width - len(name) - 1
    for n in range(math.ceil(first / step - _NEAR), math.floor(last / step + _NEAR) + 1):
        text = word(n * step)
        column = round((n * step - first) / (last - first) * (width - 1))
        start = max(0, min(column - len(text) // 2, width - len(text)))
        # Leave out a number that would overlap the axis name or another number.
        if start + len(text) <= end and not "".join(line[max(0, start - 1) : start + len(text) + 1]).strip():
            line[start : start + len(text)] = text
    line[max(0, end + 1) :] = name[:width]
    return "".join(line)


def braille(
    points: Sequence[tuple[float, float]],
    width: int,
    height: int,
    low: float,
    high: float,
    span: tuple[float, float] | None = None,
) -> list[str]:
    """Draw the points as `height` rows of `width` braille characters, connected by lines.

    `span` is the range of x, by default the range of the points.
    """
    columns, dots = 2 * width, 4 * height
    span = span or (points[0][0], points[-1][0])
    cells = [[0] * width for _ in range(height)]
    previous: tuple[int, int] | None = None
    for point in points:
        column, row = place(point, columns, dots, span, (low, high))
        for at, top, bottom in _strokes(previous, (column, row)):
            for dot in range(top, bottom + 1):
                cells[dot // 4][at // 2] |= _DOTS[at % 2][dot % 4]
        previous = (column, row)
    return ["".join(chr(0x2800 + bits) for bits in row) for row in cells]


def place(
    point: tuple[float, float], columns: int, rows: int, xs: tuple[float, float], ys: tuple[float, float]
) -> tuple[int, int]:
    """Return a point's column and row on a grid of `columns` x `rows`; row 0 is the top."""
    (x, y), (first, last), (low, high) = point, xs, ys
    column = round((x - first) / (last - first) * (columns - 1)) if last > first else columns - 1
    return column, round((high - max(low, min(high, y))) / (high - low) * (rows - 1))


def _strokes(start: tuple[int, int] | None, end: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Return the rows covered in each column by the line between two dots, as (column, top, bottom)."""
    if start is None or start[0] >= end[0]:
        rows = (end[1], end[1]) if start is None else sorted((start[1], end[1]))
        return [(end[0], rows[0], rows[1])]
    span = end[0] - start[0]
    heights = [round(start[1] + (end[1] - start[1]) * step / span) for step in range(span + 1)]
    return [(start[0] + step, *sorted((heights[step - 1], heights[step]))) for step in range(1, span + 1)]  # type: ignore[misc]
