"""The curves of a job over steps."""

from __future__ import annotations

import functools
import math

from textual.app import ComposeResult
from textual.containers import Grid

from sae_tui.format import measure
from sae_tui.jobs.output import extracts
from sae_tui.jobs.view.reader import newest_value
from sae_tui.jobs.view.sweeps import in_order
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.widgets.plot import Plot
from trainer.contract.settings.catalog import Axis, Series
from trainer.contract.settings.series import curves, held_out

OF_EXTRACTION = {"tokens_per_s": Series("rows/s", better="higher", format=".0f")}


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
    """All curves of a training, in two rows, or the one of an extraction; each in a frame."""

    DEFAULT_CSS = "CurvesPanel { height: 3fr; min-height: 6; }"

    def compose(self) -> ComposeResult:
        for name, series in {**curves(), **OF_EXTRACTION}.items():
            yield CurvePlot(name, series).add_class("panel")

    def show_detail(self, detail: JobDetail) -> None:
        shown = OF_EXTRACTION if extracts(detail.view.config) else curves()
        self.styles.grid_size_rows = n_rows = min(2, len(shown))
        self.styles.grid_size_columns = math.ceil(len(shown) / n_rows)
        for plot in self.query(CurvePlot):
            plot.display = plot.series_name in shown
            if plot.display:
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
