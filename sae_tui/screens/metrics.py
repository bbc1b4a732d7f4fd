"""All metrics for a job in a grid.

The metrics can be filtered with a regular expression, zoomed, and read off at a step.
"""

from __future__ import annotations

import re

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Input

from sae_tui.format import count, wrap
from sae_tui.jobs.view.reader import JobView
from sae_tui.panels.headline import Headline
from sae_tui.panels.metric_grid import MetricGrid, MetricSeries, metrics_of
from sae_tui.session import Session
from sae_tui.widgets.filter import Filtered
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.frame import FramedScreen
from sae_tui.widgets.lines import LineView
from trainer.contract.settings.series import USAGE
from trainer.contract.store.states import JobState
from trainer.contract.wording import plural

_ZOOM = 2.0
_STEPS_ACROSS = 60  # number of arrow key presses from one end of the plot to the other


class MetricsList(Filtered):
    """The grid of metrics, with an input line for the regular expression."""

    PLACEHOLDER = "fvu|loss, ^held, rank"

    def compose(self) -> ComposeResult:
        yield self.filter_line()
        yield LineView(id="nothing")
        yield MetricGrid(id="metric-grid")

    def explain(self, text: str) -> None:
        """Say below the line why there are no plots; "" if there are some."""
        width = max(10, self.query_one("#nothing", LineView).width - 4)
        self.query_one("#nothing", LineView).show([((f"  {part}", "dim"),) for part in wrap(text, width) if text])

    def focus_rows(self) -> None:
        self.query_one(MetricGrid).focus()


class MetricsScreen(FramedScreen):
    """Shows all metrics for the job followed by the watcher."""

    BINDINGS = [
        Binding("escape", "back", "Back", id="metrics.back", tooltip="Back to all metrics, then to the job"),
        Binding("slash", "filter", "Find", key_display="/", id="metrics.find",
                tooltip="Show metrics whose name matches a regular expression: fvu|loss, ^held, rank 1"),
        Binding("enter", "alone", "Only this", id="metrics.alone", tooltip="Show only the marked metric, or all again"),
        Binding("tab", "choose(1)", "Next", id="metrics.next", tooltip="Mark the next metric"),
        Binding("shift+tab", "choose(-1)", "Previous", show=False, id="metrics.before",
                tooltip="Mark the previous metric"),
        Binding("plus", "zoom(1)", "Zoom", key_display="+", id="metrics.zoom",
                tooltip="Show half as many steps, around the cursor or up to the latest"),
        Binding("minus", "zoom(-1)", "Zoom out", key_display="-", id="metrics.wider",
                tooltip="Show twice as many steps"),
        Binding("left", "read_out(-1)", "Read values", id="metrics.read_out",
                tooltip="Show the values of an earlier step"),
        Binding("right", "read_out(1)", "Later", show=False, id="metrics.later",
                tooltip="Show the values of a later step"),
        Binding("shift+left", "read_out(-10)", show=False),
        Binding("shift+right", "read_out(10)", show=False),
        Binding("down,pagedown,j", "page(1)", "Next page", show=False, id="metrics.page", tooltip="The next metrics"),
        Binding("up,pageup,k", "page(-1)", "Previous page", show=False, id="metrics.page_before",
                tooltip="The previous metrics"),
    ]  # fmt: skip
    HELP = "Every metric of the job over its steps; / takes a regular expression."
    DEFAULT_CSS = """
    MetricsScreen MetricPlot.-chosen { border-title-color: $text-accent; }
    MetricsScreen.-framed MetricPlot.-chosen { border: round $accent; }
    """

    def __init__(self, session: Session, job_id: int) -> None:
        super().__init__(name="metrics")
        self.session = session
        self.job_id = job_id
        self._chosen = 0  # index among the metrics matching the expression
        self._alone = False
        # The visible range of steps (None: all steps), and the step whose values are shown (None: the latest).
        self._span: tuple[float, float] | None = None
        self._cursor: float | None = None

    def compose(self) -> ComposeResult:
        yield Headline(id="headline")
        yield MetricsList(id="metrics")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(MetricGrid).focus()
        self.call_after_refresh(self.show_jobs)

    def on_screen_resume(self) -> None:
        # Another job may have been open on top of this screen.
        if (detail := self.session.detail) and detail.view.id != self.job_id:
            self.session.watcher.follow(self.job_id)

    def on_resize(self) -> None:
        self.call_after_refresh(self.show_jobs)

    @on(Input.Changed)
    def _search(self) -> None:
        self._chosen = 0
        self.show_jobs()

    def show_jobs(self) -> None:
        """Draw the latest metrics."""
        detail = self.session.detail
        if not self.is_mounted or detail is None or detail.view.id != self.job_id:
            return
        self.query_one(Headline).show_detail(detail)
        listed, grid = self.query_one(MetricsList), self.query_one(MetricGrid)
        found, problem = self._found(listed.words)
        self._chosen = max(0, min(self._chosen, len(found) - 1))
        columns, rows = grid.shape
        each = columns * rows
        first = 0 if self._alone else self._chosen - self._chosen % each
        shown = found[self._chosen : self._chosen + 1] if self._alone else found[first : first + each]
        # All plots show the same steps, so that the cursor is in the same column.
        span = self._span or self._all_steps()
        grid.show_metrics(shown, span, self._cursor, None if self._alone else self._chosen - first)
        place = f"{first + 1} to {first + len(shown)} of {plural(len(found), 'metric')}" if found else ""
        steps = f"steps {count(self._span[0])} to {count(self._span[1])}" if self._span else ""
        nothing = "no such metric" if detail.series and not found else ""
        listed.explain("" if detail.series else self._why_empty(detail.view))
        is_part = len(shown) < len(found)
        more = "↓ ↑ more" if is_part and not self._alone else ""
        listed.say(problem or " · ".join(filter(None, [nothing, place if is_part else "", more, steps])))

    @staticmethod
    def _why_empty(job: JobView) -> str:
        """Return why a job has no metrics."""
        if job.state is JobState.IMPORTED:
            return "The SAE was imported, so it has no curves. Press e on the job's screen to evaluate it."
        return "This job has no values." if job.state.is_final else "No values yet."

    def _found(self, pattern: str) -> tuple[list[MetricSeries], str]:
        """Return the metrics matching the expression, or all metrics and the error if the expression is invalid."""
        detail = self.session.detail
        assert detail is not None
        try:
            return metrics_of(detail, pattern), ""
        except re.error as error:
            return metrics_of(detail, ""), f"not a regular expression yet: {error}"

    def _all_steps(self) -> tuple[float, float] | None:
        """Return the range from step 0 to the last step of any metric."""
        detail = self.session.detail
        of_steps = [points for (name, _), points in detail.series.items() if name not in USAGE] if detail else []
        series = [points for points in of_steps if points]
        return (0, max(one[-1].step for one in series)) if series else None

    def action_filter(self) -> None:
        self.query_one(MetricsList).action_filter()

    def action_back(self) -> None:
        if self._alone:
            self.action_alone()
        else:
            self.app.pop_screen()

    def action_alone(self) -> None:
        self._alone = not self._alone
        self.show_jobs()

    def action_choose(self, by: int) -> None:
        self._chosen = max(0, self._chosen + by)
        self.show_jobs()

    def action_page(self, by: int) -> None:
        columns, rows = self.query_one(MetricGrid).shape
        self.action_choose(by if self._alone else by * columns * rows)

    def action_read_out(self, by: int) -> None:
        steps = self._span or self._all_steps()
        if steps:
            first, last = steps
            at = (last if self._cursor is None else self._cursor) + by * (last - first) / _STEPS_ACROSS
            # Past the latest step, show the current values.
            self._cursor = max(first, at) if at < last else None
            self.show_jobs()

    def action_zoom(self, by: int) -> None:
        if whole := self._all_steps():
            steps = self._span or whole
            length = (steps[1] - steps[0]) / _ZOOM**by
            middle = self._cursor if self._cursor is not None else steps[1] - length / 2
            first = max(whole[0], min(middle - length / 2, whole[1] - length))
            is_part = 1 <= length < whole[1] - whole[0]
            self._span = (first, first + length) if is_part else self._span if length < 1 else None
            self.show_jobs()
