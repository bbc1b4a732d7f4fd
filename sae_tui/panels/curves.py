"""A job's curves over its steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Grid

from sae_tui.format import measure
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.view.find import architectures
from sae_tui.jobs.view.reader import judged_value
from sae_tui.jobs.view.shape import dead_after_words
from sae_tui.jobs.view.sweeps import in_order
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.widgets.plot import Plot
from trainer.contract.settings.catalog import CurveAxis, Series
from trainer.contract.settings.series import (
    SPEED,
    curves,
    held_out,
    held_out_metrics,
    title_of,
    with_held_out,
)
from trainer.contract.store.metrics_store import Point

_LEAST_WIDTH, _LEAST_HEIGHT = 32, 5  # minimum size of a curve with its frame, in cells


class CurvePlot(Plot):
    """The plot of one job series, identified by its name in the store."""

    def __init__(self, series_name: str, series: Series) -> None:
        axis = series.curve or CurveAxis()
        is_held_out = series_name in held_out_metrics()
        super().__init__(
            title_of(held_out(series_name) if is_held_out else series_name),
            from_zero=axis.from_zero,
            least_top=axis.least_top,
            word=functools.partial(measure, series=series),
            id=f"curve-{series_name}",
        )
        self.series_name, self.series, self.is_held_out = series_name, series, is_held_out

    def show_detail(self, detail: JobDetail, span: tuple[float, float] | None = None) -> None:
        """Draw the held-out curve of the job, or of a sweep's selected SAE, with the training curve behind it."""
        if self.series_name == SPEED:
            kind = kind_of(detail.view.config)
            self.plot_title = self.series.title if kind.trains else kind.rate
        of_training, measured = (_points(detail, name) for name in (self.series_name, held_out(self.series_name)))
        nothing = "no values" if detail.view.state.is_final else "no values yet"
        if not self.is_held_out:
            window = dead_after_words(detail.view) if self.series_name == "dead_fraction" and of_training else ""
            self.show_points(of_training, f"silent {window}" if window else "", nothing, span=span)
            return
        # Show three digits, so that both values fit into a narrow frame.
        newest = f"{of_training[-1][1]:.3g}" if of_training and of_training[-1][1] is not None else ""
        note = f"batch {newest}" if measured else f"none yet · batch {newest}"
        self.show_points(measured, note if newest else "", nothing, behind=of_training, span=span)


class CurvesPanel(Grid):
    """The curves of a training job: a large one, and smaller ones next to it; an extraction job has one curve.

    Hidden for a command, whose metrics may have any names.
    """

    DEFAULT_CSS = "CurvesPanel { height: 3fr; min-height: 6; } CurvesPanel.-none { display: none; }"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._arranged: tuple[int, int, int] | None = None
        self._detail: JobDetail | None = None

    def compose(self) -> ComposeResult:
        for name, series in curves().items():
            yield CurvePlot(name, series).add_class("panel")

    def show_detail(self, detail: JobDetail) -> None:
        # Set a class instead of `display`, so that the screen can also hide the panel.
        self.set_class(kind_of(detail.view.config).is_program, "-none")
        self._detail = detail
        self._draw()

    def on_mount(self) -> None:
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        """Draw the curves, as soon as the plots exist."""
        detail = self._detail
        if detail is None or not self.children or (kind := kind_of(detail.view.config)).is_program:
            return
        names = list(curves(architectures(detail.view).split())) if kind.trains else [SPEED]
        shown = names[: self._arrange(len(names))]
        span = _steps(detail, shown)
        for plot in self.query(CurvePlot):
            plot.display = plot.series_name in shown
            if plot.display:
                plot.show_detail(detail, span)

    def _arrange(self, n_curves: int) -> int:
        """Lay out the grid, and return how many curves it shows: the first is as tall as all the curves next to it."""
        width, height = self.size
        n_columns = max(0, min(2 if n_curves > 4 else 1, width // _LEAST_WIDTH - 1, n_curves - 1))
        n_rows = max(1, min(-(-(n_curves - 1) // (n_columns or 1)), height // _LEAST_HEIGHT))
        if (shape := (n_columns, n_rows, n_curves)) != self._arranged:
            self._arranged = shape
            self.styles.grid_size_columns, self.styles.grid_size_rows = 1 + n_columns, n_rows
            self.styles.grid_columns = ("1fr", "3fr 2fr", "2fr 1fr 1fr")[n_columns]
            self.query(CurvePlot).first().styles.row_span = n_rows if n_columns else 1
        return 1 + n_columns * n_rows if n_columns else n_rows


def _steps(detail: JobDetail, names: Sequence[str]) -> tuple[float, float] | None:
    """Return the range from step 0 to the last step of any of these series, so that all curves have the same axis."""
    wanted = {each for name in names for each in with_held_out(name)}
    last = [
        points[-1].step for (name, _), points in detail.series.items() if points and name.partition("@")[0] in wanted
    ]
    return (0, max(last)) if last else None


def _points(detail: JobDetail, name: str) -> list[tuple[float, float | None]]:
    """Return the points of a series for the selected SAE, or for the run if its SAEs share the series."""
    is_shared = not any(other.startswith(f"{name}@") for other, _ in detail.series)
    points: Sequence[Point] = detail.series.get((of_member(name, "" if is_shared else detail.member), 0), ())
    return [(point.step, point.value) for point in points]


def judged(detail: JobDetail, name: str, member: str = "") -> tuple[float | None, bool]:
    """Return a metric's last held-out value and False, or its last batch value and True if there is no held-out value.

    `member` is the label of an SAE in a sweep.
    """
    if not member:
        return judged_value(detail.view, name)
    is_held_out = name in held_out_metrics()
    for each in with_held_out(name):
        if points := detail.series.get((of_member(each, member), 0), ()):
            return points[-1].value, is_held_out and each == name
    return None, False


def of_member(name: str, member: str) -> str:
    """Return a metric's name in the store, for the run or for one SAE in a sweep."""
    return f"{name}@{member}" if member else name


def members_of(detail: JobDetail) -> list[str]:
    """Return the labels of a sweep's SAEs, like "k=16", in the order of the job file, or [] for a single SAE."""
    labels = [name.removeprefix("fvu@") for name, rank in detail.series if name.startswith("fvu@") and rank == 0]
    return in_order(labels, detail.view.config)
