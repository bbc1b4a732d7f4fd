"""The curves of several runs in one plot."""

from __future__ import annotations

import math
from collections.abc import Sequence

from textual.events import Resize

from sae_tui.compare.lines import CurveView, Trace, log_ticks, traces
from sae_tui.compare.runs import Comparison
from sae_tui.compare.tables import word_of
from sae_tui.format import count, duration, fit
from sae_tui.widgets.chart import AXIS, Canvas, Chart, frame, glyph, legend
from sae_tui.widgets.lines import Line
from sae_tui.widgets.plot import braille, place, round_axis, x_axis, y_range
from trainer.contract.settings.catalog import CurveAxis
from trainer.contract.settings.series import series_named, title_of

MOST_CURVES = 16
_BETWEEN = 16  # distance between two glyphs on a curve, in cells


class Overlay(Chart):
    """One metric for all runs, with a legend showing the latest values."""

    def on_mount(self) -> None:
        self._comparison, self._view = Comparison(), CurveView()

    def show_comparison(self, comparison: Comparison, view: CurveView) -> None:
        self._comparison, self._view = comparison, view
        self._draw()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width, height = self.size.width, self.size.height
        if not width:
            return
        shown = traces(self._comparison.curves[:MOST_CURVES], self._view)
        names = [self._comparison.saes[trace.sae].job.name for trace in shown]
        entries = [_entry(trace, name, self._view.metric) for trace, name in zip(shown, names, strict=True)]
        below = legend(entries, width, max(1, height // 3))
        n_lines = height if self.has_title else height - 1
        drawn = _plot([trace for trace in shown if trace.points], self._view, width, n_lines - 1 - len(below))
        self.show_titled(self._heading(), [*drawn, *below][:n_lines])

    def _heading(self) -> Line:
        view, comparison = self._view, self._comparison
        words = [
            f"over {view.axis}",
            f"smoothed {view.smoothing:g}" if view.smoothing else "",
            "log" if view.log else "",
            f"{MOST_CURVES} of {len(comparison.curves)} curves" if len(comparison.curves) > MOST_CURVES else "",
        ]
        title = title_of(comparison.metric) if comparison.metric else "Curves"
        return (f"{title} ", "title"), (" · ".join(filter(None, words)), "label")


def _entry(trace: Trace, name: str, metric: str) -> Line:
    newest = "no values" if trace.newest is None else word_of(metric)(trace.newest)
    return glyph(trace.sae), (f" {trace.label} {name}", "text"), (f" {newest}", "accent")


def _plot(shown: Sequence[Trace], view: CurveView, width: int, height: int) -> list[Line]:
    """Return the curves with both axes in `height` + 1 lines."""
    columns = width - AXIS
    if columns < 2 or height < 1:
        return []
    if not shown:
        text = "  no values above 0" if view.log else "  no values yet"
        return [((fit(text, width), "dim"),), *[((" " * width, "text"),)] * height]
    span = 0.0, max(x for trace in shown for x, _ in trace.points)
    scaled = [[(x, math.log10(y) if view.log else y) for x, y in trace.points] for trace in shown]
    low, high, labels = _y_axis([y for points in scaled for _, y in points], view, height)
    canvas = Canvas(columns, height)
    for trace, points in zip(shown, scaled, strict=True):
        canvas.draw(braille(points, columns, height, low, high, span), glyph(trace.sae)[1])
    for trace, points in zip(shown, scaled, strict=True):
        places = [place(point, columns, height, span, (low, high)) for point in points]
        for x, y in _glyph_places(places, trace.sae):
            canvas.put(x, y, glyph(trace.sae))
    word = duration if view.axis == "time" else count
    foot = " " * AXIS + x_axis(span, view.axis, columns, word)
    return [*frame(canvas.rows(), labels), ((fit(foot, width), "dim"),)]


def _y_axis(values: Sequence[float], view: CurveView, height: int) -> tuple[float, float, dict[int, str]]:
    """Return the range of the y axis and its labels by row; `values` are logarithms on a logarithmic scale.

    On a linear scale, the metric has the same axis as on other screens.
    """
    word = word_of(view.metric)
    if not view.log:
        axis = series_named(view.metric).curve or CurveAxis(from_zero=False)
        low, high, ticks = round_axis(*y_range(values, from_zero=axis.from_zero, least_top=axis.least_top), rows=height)
        return low, high, {row: word(tick) for row, tick in ticks.items()}
    low, high = y_range(values, from_zero=False)
    rows = {
        place((0, math.log10(tick)), 1, height, (0, 1), (low, high))[1]: tick for tick in log_ticks(10**low, 10**high)
    }
    # Skip labels in neighbouring rows, because they are hard to distinguish.
    return low, high, {row: word(tick) for row, tick in rows.items() if row + 1 not in rows}


def _glyph_places(places: Sequence[tuple[int, int]], number: int) -> list[tuple[int, int]]:
    """Return the cells for a curve's glyph: at the latest point, and every few cells, offset from other curves."""
    chosen, due = [places[-1]], (3 + 5 * number) % _BETWEEN
    for x, y in places:
        if x >= due:
            chosen.append((x, y))
            due += _BETWEEN * (1 + (x - due) // _BETWEEN)
    return chosen
