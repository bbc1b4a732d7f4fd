"""The first screen: all GPUs, and the jobs below them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Footer

from sae_tui.panels.aggregate import AggregatePanel, totals
from sae_tui.panels.finder import JobsFinder
from sae_tui.panels.gpus import GpuPanel, GpuRow
from sae_tui.panels.jobs import JobsPanel
from sae_tui.panels.status import ASKING, StatusLine
from sae_tui.screens.job_keys import JobKeys
from sae_tui.widgets.table import KeyedTable

if TYPE_CHECKING:
    from sae_tui.app import SaeApp

NO_GPUS = "Jobs run on the CPU here. n: try one · d: why · sae-tui --demo: simulated GPUs"
_JOB_LINES = 5  # heading and four jobs stay visible whatever the GPUs take


class Dashboard(JobKeys):
    """Aggregated or per GPU, toggled by one key; the jobs table takes the rest."""

    BINDINGS = [
        Binding("v", "toggle_view", "View", id="dashboard.view", tooltip="Aggregated view or a card per GPU"),
        Binding("left_square_bracket", "scroll_gpus(-1)", "GPUs up", key_display="[", show=False,
                id="dashboard.gpus_up", tooltip="The GPUs above those that are shown"),
        Binding("right_square_bracket", "scroll_gpus(1)", "GPUs down", key_display="]", show=False,
                id="dashboard.gpus_down", tooltip="The GPUs below those that are shown"),
        Binding("n", "app.new_job", "New job", id="dashboard.new", tooltip="Choose GPUs and launch a training"),
        Binding("enter", "open_job", "Open", id="dashboard.open", tooltip="Curves, events and log of the job"),
        Binding("s", "stop_job", "Stop", id="dashboard.stop", tooltip="Save a checkpoint and stop the selected job"),
        Binding("p", "pause_job", "Pause", id="dashboard.pause", tooltip="Save and free the GPUs until it is resumed"),
        Binding(
            "g", "continue_job", "Resume", id="dashboard.continue", tooltip="Resume it where it was, or release it"
        ),
        Binding("y", "clone_job", "Clone", show=False, id="dashboard.clone", tooltip="A new job like this one"),
        Binding("D", "delete_job", "Delete", show=False, id="dashboard.delete", tooltip="Delete it, or those marked"),
        Binding("u", "app.undo_delete", "Undo", show=False, id="dashboard.undo", tooltip="Bring back what was deleted"),
    ]  # fmt: skip
    app: SaeApp

    def __init__(self, view: str) -> None:
        super().__init__(id="dashboard")
        self.view = view

    def compose(self) -> ComposeResult:
        yield StatusLine(id="status")
        yield AggregatePanel(id="aggregate")
        yield GpuPanel(id="gpus")
        yield JobsFinder(id="finder")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(JobsPanel).focus()
        self.show_gpus()
        self.show_jobs()

    def on_screen_resume(self) -> None:
        self.show_gpus()
        self.show_jobs()

    def on_resize(self) -> None:
        self.show_gpus()

    def show_gpus(self) -> None:
        """Draws the latest samples."""
        if not self.is_mounted:
            return
        monitor, height = self.app.monitor, self.size.height
        samples = monitor.latest()
        past = monitor.past(self.size.width)
        cards = self.view == "per_gpu"
        rows_each = 0 if cards and height < 30 else 1 if cards or height < 35 else 2
        aggregate = self.query_one(AggregatePanel)
        aggregate.display = bool(samples) and rows_each > 0
        if aggregate.display:
            aggregate.show_totals(totals(samples, past), rows_each=rows_each)
        rows = [GpuRow(sample, *self.app.holder(sample), partial(past.column, sample.index)) for sample in samples]
        room = max(3, height - 2 - _JOB_LINES - (4 * rows_each if aggregate.display else 0))
        panel = self.query_one(GpuPanel)
        panel.styles.max_height = room
        if rows:
            panel.show_gpus(rows, cards=cards, room=room)
        elif monitor.opening:
            panel.show_words(ASKING, "dim")
        else:
            panel.show_words(NO_GPUS, "text")
        self.query_one(StatusLine).show_status(self.app.status())

    def show_jobs(self) -> None:
        """Draws the jobs as last read."""
        if self.is_mounted:
            self.query_one(JobsFinder).show_jobs(self.app.jobs, self.app.watcher.problem)
            self.query_one(StatusLine).show_status(self.app.status())

    def select(self, job_id: int | None) -> None:
        """Puts the cursor on a job, which may not be in the list yet."""
        for panel in self.query(JobsPanel):
            panel.select(str(job_id))

    def action_toggle_view(self) -> None:
        self.view = "aggregated" if self.view == "per_gpu" else "per_gpu"
        self.show_gpus()

    def action_scroll_gpus(self, pages: int) -> None:
        self.query_one(GpuPanel).scroll_gpus(pages)

    def action_open_job(self) -> None:
        job_id = self.query_one(JobsPanel).selected
        if job_id is not None:
            self.app.open_job(job_id)

    def action_stop_job(self) -> None:
        self._with_selected(self.app.stop_job)

    def action_pause_job(self) -> None:
        self._with_selected(self.app.pause_job)

    def action_continue_job(self) -> None:
        self._with_selected(self.app.continue_job)

    def action_clone_job(self) -> None:
        self._with_selected(self.app.clone_job)

    def action_delete_job(self) -> None:
        self.app.delete_jobs(self.targets)

    def _with_selected(self, act: Callable[[int], object]) -> None:
        job_id = self.query_one(JobsPanel).selected
        if job_id is not None:
            act(job_id)

    @on(KeyedTable.Chosen)
    def _open(self, event: KeyedTable.Chosen) -> None:
        self.app.open_job(int(event.key))
