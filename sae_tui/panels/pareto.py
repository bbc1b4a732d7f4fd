"""Plots FVU against L0, with the Pareto front: the SAEs not beaten by any other SAE in both metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence

from textual.events import Resize

from sae_tui.compare.runs import Comparison
from sae_tui.compare.tables import BEST, UNFINISHED, value_of
from sae_tui.format import fit, number
from sae_tui.jobs.states import is_ranked
from sae_tui.widgets.chart import AXIS, Canvas, Chart, frame, glyph, legend
from sae_tui.widgets.lines import Line, Span
from sae_tui.widgets.plot import braille, place, round_axis, round_span, x_axis

Point = tuple[float, float]
# Axis titles if no SAE was evaluated.
OF_BATCHES = ("batch L0", "batch FVU")


class ParetoPanel(Chart):
    """Shows a point for each SAE, and the Pareto front as a line.

    Points show held-out values, or values from report cards if all SAEs have one. The front includes only SAEs from
    finished runs, and never uses values measured on training batches.
    """

    def on_mount(self) -> None:
        self._comparison = Comparison()

    def show_comparison(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._draw()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width, height = self.size.width, self.size.height
        if not width:
            return
        names, points = points_of(self._comparison)
        known_points = {place: point for place, point in enumerate(points) if point}
        judged = {} if names == OF_BATCHES else known_points
        ranked = {at: point for at, point in judged.items() if is_ranked(self._comparison.saes[at].job)}
        best = {list(ranked)[at] for at in front(list(ranked.values()))}
        below = legend(
            [self._entry(at, at in best, points[at]) for at in range(len(points))], width, max(1, height // 3)
        )
        note = "no Pareto front before an evaluation" if names == OF_BATCHES else f"{BEST} Pareto front"
        heading: Line = (f"{names[1]} against {names[0]} ", "title"), (note, "label")
        n_lines = height if self.has_title else height - 1
        drawn = _plot(known_points, best, names[0], width, n_lines - 1 - len(below))
        self.show_titled(heading, [*drawn, *below][:n_lines])

    def _entry(self, at: int, best: bool, point: Point | None) -> Line:
        sae = self._comparison.saes[at]
        values = f" · L0 {number(point[0])} · FVU {number(point[1])}" if point else " no values"
        unfinished = f" {UNFINISHED}" if point and not is_ranked(sae.job) else ""
        mark: Span = (f" {BEST}", "good") if best else (unfinished, "dim")
        return glyph(at), (f" {sae.label} {sae.job.name}", "text"), (values, "accent"), mark


def points_of(comparison: Comparison) -> tuple[tuple[str, str], list[Point | None]]:
    """Return the axis titles, and (L0, FVU) for each SAE, or None for an SAE lacking one of these values."""
    for prefix, title in (("heldout_", "held-out"), ("card_", "report card")):
        measured = _points(comparison, f"{prefix}l0", f"{prefix}fvu")
        if measured and None not in measured:
            return (f"{title} L0", f"{title} FVU"), measured
    if any(measured := _points(comparison, "heldout_l0", "heldout_fvu")):
        # The other SAEs are not evaluated yet, and their batch values would make them look too good.
        return ("held-out L0", "held-out FVU"), measured
    return OF_BATCHES, _points(comparison, "l0", "fvu")


def _points(comparison: Comparison, x: str, y: str) -> list[Point | None]:
    pairs = [(value_of(sae, x), value_of(sae, y)) for sae in comparison.saes]
    return [(l0, fvu) if l0 is not None and fvu is not None else None for l0, fvu in pairs]


def _plot(points: dict[int, Point], best: set[int], title: str, width: int, height: int) -> list[Line]:
    columns = width - AXIS
    if columns < 2 or height < 1:
        return []
    if not points:
        return [((fit("  no values yet", width), "dim"),), *[((" " * width, "text"),)] * height]
    around_x, around_y = (_around([point[axis] for point in points.values()]) for axis in (0, 1))
    xs = round_span(*around_x, columns)
    bottom, top, ticks = round_axis(*around_y, rows=height)
    ys = bottom, top
    canvas = Canvas(columns, height)
    canvas.draw(braille(_stairs([points[at] for at in best]), columns, height, *ys, xs), "dim")
    # Points on the front are placed first, in their exact cells. If a cell is taken, the nearest free one is used.
    taken: set[tuple[int, int]] = set()
    for at in sorted(points, key=lambda at: at not in best):
        cell = _free(place(points[at], columns, height, xs, ys), taken, columns)
        taken.add(cell)
        canvas.put(*cell, glyph(at))
    foot = " " * AXIS + x_axis(xs, title, columns, number)
    return [*frame(canvas.rows(), {row: number(tick) for row, tick in ticks.items()}), ((fit(foot, width), "dim"),)]


def _free(cell: tuple[int, int], taken: set[tuple[int, int]], columns: int) -> tuple[int, int]:
    """Return the cell, or the nearest free one in its row, so that the points of similar runs do not overlap."""
    x, y = cell
    nearest = sorted(range(columns), key=lambda other: (abs(other - x), other < x))
    return next(((other, y) for other in nearest if (other, y) not in taken), cell)


def _stairs(points: Sequence[Point]) -> list[Point]:
    """Return the stepped line that bounds the area dominated by the points."""
    edge: list[Point] = []
    for x, y in sorted(points):
        if edge:
            edge.append((x, edge[-1][1]))
        edge.append((x, y))
    return edge


def _around(values: Sequence[float]) -> tuple[float, float]:
    """Return a range with a margin around the values, but not below 0."""
    low, high = min(values), max(values)
    space = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return max(0.0, low - space), high + space


def front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Return the indices of points not dominated by another point (as low in both coordinates and lower in one)."""
    places: set[int] = set()
    lowest, last = math.inf, (math.nan, math.nan)
    for at in sorted(range(len(points)), key=lambda at: points[at]):
        if points[at][1] < lowest or points[at] == last:
            places.add(at)
            lowest, last = points[at][1], points[at]
    return places
