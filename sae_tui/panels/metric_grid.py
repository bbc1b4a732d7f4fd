"""All metrics for a job in a grid of plots; each plot can also be enlarged."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from textual.containers import Grid

from sae_tui.format import count, duration, measure
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.widgets.plot import Plot
from trainer.contract.settings.catalog import CurveAxis
from trainer.contract.settings.series import SPEED, USAGE, curves, series_named, title_of, with_held_out
from trainer.contract.store.metrics_store import Point

_LEAST_COLUMNS, _LEAST_ROWS = 38, 8  # minimum size of a plot with its frame


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """A job's series and its points, identified by rank and name in the store (`fvu`, or `fvu@k=16` in a sweep)."""

    name: str
    rank: int
    points: Sequence[Point]
    is_of_program: bool = False

    @property
    def title(self) -> str:
        """The title of the plot, with the rank if it is not 0."""
        if self.name in USAGE:
            return f"{title_of(self.name)}, by second"
        if self.is_of_program and self.name == SPEED:
            return "steps/s"
        return f"{title_of(self.name)} · rank {self.rank}" if self.rank else title_of(self.name)

    def is_found(self, seek: re.Pattern[str]) -> bool:
        """Return True if the expression matches the title or the name in the store."""
        return bool(seek.search(self.title) or seek.search(self.name))


def metrics_of(detail: JobDetail, pattern: str) -> list[MetricSeries]:
    """Return the series matching the regular expression; raise `re.error` if it is invalid."""
    seek = re.compile(pattern, re.IGNORECASE)
    # In a sweep, a series without a label repeats the first SAE's series.
    labelled = {name.partition("@")[0] for name, _ in detail.series if "@" in name}
    shown = {key: points for key, points in detail.series.items() if key[0] not in labelled}
    is_program = kind_of(detail.view.config).is_program
    found = [MetricSeries(name, rank, points, is_program) for (name, rank), points in shown.items()]
    return sorted((one for one in found if one.is_found(seek)), key=lambda one: (_place(one.name), one.title))


def _place(name: str) -> tuple[int, str]:
    """Return a sort key: metrics with a curve on the job's screen come first, in the order of that screen."""
    base, order = name.partition("@")[0], [each for metric in curves() for each in with_held_out(metric)]
    return (order.index(base), name) if base in order else (len(order) + (base in USAGE), name)


class MetricPlot(Plot):
    """A plot that can be reused for any metric."""

    def __init__(self) -> None:
        super().__init__("")
        self.add_class("panel")

    def show_metric(self, metric: MetricSeries, span: tuple[float, float] | None, cursor: float | None) -> None:
        """Draw a metric, or only its values between two steps."""
        is_usage = metric.name in USAGE
        self.x_name = "" if is_usage else "step"
        self.x_word = duration if is_usage else count
        if is_usage:
            span = cursor = None  # Its "steps" are seconds.
        series = series_named(metric.name.partition("@")[0])
        axis = series.curve or CurveAxis(from_zero=False)
        self.plot_title, self.word = metric.title, functools.partial(measure, series=series)
        self.from_zero, self.least_top = axis.from_zero, axis.least_top
        first, last = span or (-math.inf, math.inf)
        shown = [(point.step, point.value) for point in metric.points if first <= point.step <= last]
        nothing = "no values in these steps" if metric.points else "no values yet"
        self.show_points(shown, nothing=nothing, cursor=cursor, span=span)


class MetricGrid(Grid, can_focus=True):
    """A grid of plots. Plots that do not fit are on the next page."""

    DEFAULT_CSS = "MetricGrid { height: 1fr; }"

    def on_mount(self) -> None:
        self._plots: list[MetricPlot] = []

    @property
    def shape(self) -> tuple[int, int]:
        """The number of plot columns and rows that fit."""
        return max(1, self.size.width // _LEAST_COLUMNS), max(1, self.size.height // _LEAST_ROWS)

    def show_metrics(
        self,
        metrics: Sequence[MetricSeries],
        span: tuple[float, float] | None,
        cursor: float | None,
        chosen: int | None,
    ) -> None:
        """Draw these metrics, which must all fit, and highlight the one at index `chosen`; Enter enlarges it."""
        if not self.display:
            # Do not add plots to a screen that is closing, because a plot without a screen has no styles.
            return
        columns, _ = self.shape
        n_columns = max(1, min(columns, len(metrics)))
        self.styles.grid_size_columns = n_columns
        self.styles.grid_size_rows = max(1, -(-len(metrics) // n_columns))
        if len(self._plots) < len(metrics):
            fresh = [MetricPlot() for _ in range(len(metrics) - len(self._plots))]
            self._plots += fresh
            self.mount(*fresh)
        for place, plot in enumerate(self._plots):
            plot.display = place < len(metrics)
            if plot.display:
                plot.set_class(place == chosen, "-chosen")
                plot.show_metric(metrics[place], span, cursor)
