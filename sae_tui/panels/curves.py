"""The curves of a job over steps."""

from __future__ import annotations

import functools
import math

from textual.app import ComposeResult
from textual.containers import Grid

from sae_tui.format import measure
from sae_tui.jobs.view.reader import newest_value
from sae_tui.jobs.view.sweeps import in_order
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.widgets.plot import Plot
from trainer.contract.settings.catalog import Axis, Series
from trainer.contract.settings.series import curves, held_out


class CurvePlot(Plot):
    """The plot of one series of a job, by its name in the store."""

    def __init__(self, series_name: str, series: Series) -> None:
        axis = series.curve or Axis()
        super().__init__(
            series.title,
            from_zero=axis.from_zero,
            least_top=axis.least_top,
            word=functools.partial(measure, series=series),
            id=f"curve-{series_name}",
        )
        self.series_name, self.series = series_name, series

    def show_detail(self, detail: JobDetail) -> None:
        """Draw the curve of the job, or of the SAE of its sweep that is shown."""
        points = detail.series.get((of_member(self.series_name, detail.member), 0), ())
        measured = detail.series.get((of_member(held_out(self.series_name), detail.member), 0), ())
        note = f"held-out {measure(measured[-1].value, self.series)}" if measured else ""
        nothing = "no values" if detail.view.state.is_final else "no values yet"
        self.show_points([(point.step, point.value) for point in points], note, nothing)


class CurvesPanel(Grid):
    """All curves, in two rows."""

    DEFAULT_CSS = "CurvesPanel { grid-size: 2 2; grid-gutter: 0 1; height: 3fr; min-height: 6; }"

    def compose(self) -> ComposeResult:
        shown = curves()
        self.styles.grid_size_columns = math.ceil(len(shown) / 2)
        for name, series in shown.items():
            yield CurvePlot(name, series)

    def show_detail(self, detail: JobDetail) -> None:
        for plot in self.query(CurvePlot):
            plot.show_detail(detail)


def newest(detail: JobDetail, name: str, member: str = "") -> float | None:
    """Return the last value of a metric; None where there is none yet."""
    points = detail.series.get((of_member(name, member), 0), ())
    return points[-1].value if points else None if member else newest_value(detail.view, name)


def of_member(name: str, member: str) -> str:
    """Return a metric's name in the store: of the run, or of one SAE of a sweep."""
    return f"{name}@{member}" if member else name


def members_of(detail: JobDetail) -> list[str]:
    """Return the labels of a sweep's SAEs, like "k=16", in the order of the job file; empty for a run of one."""
    labels = [name.removeprefix("fvu@") for name, rank in detail.series if name.startswith("fvu@") and rank == 0]
    return in_order(labels, detail.view.config)
