"""Draws curves as SVG: axes with ticks, a legend, and a colour, dash pattern and marker for each curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from sae_tui.compare.lines import AXES, CurveView, Trace, log_ticks, ticks
from trainer.contract.printable import printable
from trainer.contract.settings.series import title_of
from trainer.contract.wording import number

# The Okabe-Ito palette, safe for all types of colour blindness. Yellow is omitted because it is too light on a white
# background.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8c564b")
_DASHES = ("none", "7 3", "2 3", "9 3 2 3")
_MARKS = ("M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-4,4h8l-4,-8z", "M-4,-4h8v8h-8z", "M0,-5l5,5l-5,5l-5,-5z")
_HEIGHT = 480
_LEFT, _TOP, _RIGHT, _BOTTOM = 76, 40, 610, 52  # left, top and right edges of the plot, and the space below it
_LINE, _LETTER = 18, 7  # height of a line and width of a letter in the legend
_LONGEST_TITLE = 90


class PlotArea(NamedTuple):
    """The lower edge of the plot, and the ranges of both axes."""

    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]
    log: bool

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return a point's pixel coordinates."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        low, high, y = (math.log(value) if self.log else value for value in (*self.y, y))
        return _LEFT + across * (_RIGHT - _LEFT), self.bottom - (y - low) / (high - low) * (self.bottom - _TOP)


def svg(traces: Sequence[Trace], view: CurveView, title: str) -> str:
    """Return the complete SVG image as text; a trace without points appears only in the legend."""
    height = max(_HEIGHT, _TOP + _LINE * len(traces) + _BOTTOM)
    width = _RIGHT + 56 + _LETTER * max([19, *(len(_label(trace)) for trace in traces)])
    box = _box([point for trace in traces for point in trace.points], view, height - _BOTTOM)
    body = [*_axes(box), *_titles(box, view, title)]
    for style, trace in enumerate(traces):
        body += [*_curve(trace, box, style), *_entry(trace, style)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    font = 'font-family="sans-serif" font-size="12"'
    return "\n".join([f"{head} {font}>", '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>\n"])


def _box(points: Sequence[tuple[float, float]], view: CurveView, bottom: float) -> PlotArea:
    """Return a plot area with axes that cover all points."""
    xs, ys = ([point[axis] for point in points] or [0.0, 1.0] for axis in (0, 1))
    y = min(ys), max(ys)
    if not points or (view.log and y[0] <= 0):
        y = (0.1, 1.0)
    return PlotArea(bottom, _wide(min(xs), max(xs)), _wide(*y, log=view.log), view.log)


def _wide(low: float, high: float, *, log: bool = False) -> tuple[float, float]:
    """Return the range, widened if empty."""
    if high > low:
        return low, high
    return (low / 2, high * 2) if log else (low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1))


def _axes(box: PlotArea) -> Iterator[str]:
    """Draw the frame with ticks, and a faint line at each y tick."""
    for tick in ticks(*box.x):
        x, _ = box.place(tick, box.y[0])
        yield f'<path d="M{x:.1f},{box.bottom}v5" stroke="black"/>'
        yield _text(x, box.bottom + 18, number(tick), "middle")
    for tick in log_ticks(*box.y) if box.log else ticks(*box.y):
        _, y = box.place(box.x[0], tick)
        yield f'<path d="M{_LEFT},{y:.1f}H{_RIGHT}" stroke="#dddddd"/><path d="M{_LEFT - 5},{y:.1f}h5" stroke="black"/>'
        yield _text(_LEFT - 8, y + 4, number(tick), "end")
    yield f'<path d="M{_LEFT},{_TOP}V{box.bottom}H{_RIGHT}" fill="none" stroke="black"/>'


def _titles(box: PlotArea, view: CurveView, title: str) -> Iterator[str]:
    title = title if len(title) <= _LONGEST_TITLE else f"{title[: _LONGEST_TITLE - 1]}…"
    yield _text(_LEFT, 24, title, size=15)
    yield _text((_LEFT + _RIGHT) / 2, box.bottom + 40, AXES[view.axis], "middle")
    middle = (_TOP + box.bottom) / 2
    smoothed = f" (smoothed {view.smoothing:g})" if view.smoothing else ""
    turned = f' transform="rotate(-90 18 {middle:.0f})"'
    yield _text(18, middle, title_of(view.metric) + smoothed, "middle", more=turned)


def _curve(trace: Trace, box: PlotArea, style: int) -> Iterator[str]:
    places = [box.place(x, y) for x, y in trace.points]
    if not places:
        return
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    colour, dash, _ = _style(style)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
    yield _mark(*places[-1], style)


def _entry(trace: Trace, style: int) -> Iterator[str]:
    """Draw a trace's legend entry, with its latest value."""
    x, y = _RIGHT + 16, _TOP + _LINE * style + 6
    colour, dash, _ = _style(style)
    yield f'<path d="M{x},{y}h24" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
    yield _mark(x + 12, y, style)
    yield _text(x + 30, y + 4, _label(trace))


def _label(trace: Trace) -> str:
    return trace.label if trace.newest is None else f"{trace.label}  {number(trace.newest)}"


def _style(number: int) -> tuple[str, str, str]:
    """Return the colour, dash pattern and marker of a curve. Up to 16 curves are distinguishable without colour."""
    mark = number // len(_DASHES) % len(_MARKS)
    return COLOURS[number % len(COLOURS)], _DASHES[number % len(_DASHES)], _MARKS[mark]


def _mark(x: float, y: float, style: int) -> str:
    colour, _, mark = _style(style)
    return f'<path d="{mark}" transform="translate({x:.1f} {y:.1f})" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", *, size: int = 12, more: str = "") -> str:
    shown = escape(printable(text), quote=False)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{more}>{shown}</text>'
