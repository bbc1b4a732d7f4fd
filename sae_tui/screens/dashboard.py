"""The first screen: all GPUs, with the jobs below them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.timer import Timer
from textual.widget import Widget

from sae_tui.format import duration
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.past import RecentHistory
from sae_tui.gpu.window import stored_past
from sae_tui.jobs.features import features_of_job, has_features
from sae_tui.jobs.view.arrays import ArrayView
from sae_tui.jobs.view.reader import JobView
from sae_tui.panels.aggregate import AggregatePanel, totals
from sae_tui.panels.gpu_cards import card_grid
from sae_tui.panels.gpu_map import LEGEND, map_grid
from sae_tui.panels.gpu_row import GpuRow, fold_withheld
from sae_tui.panels.gpus import GpuPanel, Shape
from sae_tui.panels.jobs import JOBS, JobsPanel, first_steps, run_time
from sae_tui.panels.preview import PreviewPanel
from sae_tui.panels.status import ASKING, StatusLine
from sae_tui.screens.dashboard_rows import PanelHeights, arrange
from sae_tui.screens.job_edits import JobEdits
from sae_tui.screens.look_back import LookBack, span_keys
from sae_tui.screens.offers import offers_for, offers_for_array
from sae_tui.session import Session
from sae_tui.widgets.footer import Footer, FooterOffer
from sae_tui.widgets.frame import FramedScreen, entitle, frame_of
from sae_tui.widgets.lines import Line
from sae_tui.widgets.table import KeyedTable
from trainer.contract.errors import UserError
from trainer.contract.extras import missing_of_trainer

if TYPE_CHECKING:
    from sae_tui.screens.dashboard_hosts import DashboardHosts

NO_GPUS = "d: why, and what to do · sae-tui --demo: simulated GPUs"
GPUS, _EVERYWHERE = Binding.Group("GPUs"), Binding.Group("Everywhere")
_IDS = {verb: f"jobs.{verb}" for verb in ("mark", "compare", "hold", "after", "sooner")}
_LAUNCHES = ("dashboard.new", "dashboard.extract", "dashboard.command")
# Keys that are shown only when they can be used.
_OF_JOBS = frozenset(
    {
        f"dashboard.{verb}"
        for verb in ("open", "stop", "pause", "continue", "log", "features", "clone", "delete", "undo")
    }
    | {*_IDS.values(), "jobs.filter"}
)
_TITLES = {"aggregate": "All GPUs", "gpus": "GPUs", "finder": "Jobs"}
_GRIDS = {"map": map_grid, "per_gpu": card_grid}
_SHAPES: dict[str, Shape] = {"aggregated": "lines", "per_gpu": "cards", "map": "map"}
# A job's preview is read once the cursor has stayed on the job for this long.
_RESTED_S = 0.2


class Dashboard(FramedScreen):
    """Shows the GPUs as totals, lines, cards or a map; the jobs table takes the remaining rows."""

    BINDINGS = [
        Binding("v", "toggle_view", "View", id="dashboard.view", group=GPUS,
                tooltip="Lines, card view or map"),
        *(Binding(str(index), f"open_gpu({index})", show=False, group=GPUS, id=f"dashboard.gpu_{index}",
                  key_display="0…9", tooltip="The GPU with this index in full screen" if index == 0 else "")
          for index in range(10)),
        Binding("left_square_bracket", "scroll_gpus(-1)", "GPUs up", key_display="[", show=False, group=GPUS,
                id="dashboard.gpus_up", tooltip="Scroll to the GPUs above"),
        Binding("right_square_bracket", "scroll_gpus(1)", "GPUs down", key_display="]", show=False, group=GPUS,
                id="dashboard.gpus_down", tooltip="Scroll to the GPUs below"),
        # While the jobs table has the focus, + and - change the priority of a job.
        *span_keys("dashboard", GPUS, (">", "<"), show=False),
        Binding("t", "open_processes", "Processes", show=False, id="dashboard.processes", group=GPUS,
                tooltip="GPU processes: user, memory, command; send signals"),
        Binding("n", "app.new_job", "New job", id="dashboard.new", group=JOBS,
                tooltip="Choose GPUs and launch a job"),
        Binding("e", "app.new_job('extract')", "Extract", id="dashboard.extract", group=JOBS,
                tooltip="Extract activations of a language model to train on"),
        Binding("r", "app.new_job('command')", "Run", id="dashboard.command", group=JOBS,
                tooltip="Run any program as a job"),
        Binding("enter", "open_job", "Open", id="dashboard.open", group=JOBS,
                tooltip="Curves, events and log of the job"),
        Binding("s", "stop_job", "Stop", id="dashboard.stop", group=JOBS,
                tooltip="Stop the selected job; training saves a checkpoint first"),
        Binding("p", "pause_job", "Pause", id="dashboard.pause", group=JOBS,
                tooltip="Stop and free the GPUs until you resume the job; training saves first"),
        Binding("g", "continue_job", "Resume", id="dashboard.continue", group=JOBS,
                tooltip="Resume from a checkpoint, run a command again, or release a held job"),
        Binding("l", "open_log", "Log", id="dashboard.log", group=JOBS,
                tooltip="The logs of the job: follow, search, filter"),
        Binding("f", "open_features", "Features", id="dashboard.features", group=JOBS,
                tooltip="Max-activating examples of its latents"),
        Binding("y", "clone_job", "Clone", id="dashboard.clone", group=JOBS,
                tooltip="A new job with the settings of this one"),
        Binding("D", "delete_job", "Delete", id="dashboard.delete", group=JOBS,
                tooltip="Delete the job, or the marked jobs"),
        Binding("u", "app.undo_delete", "Undo", id="dashboard.undo", group=JOBS,
                tooltip="Restore the last deleted jobs"),
        Binding("comma", "app.settings", "Settings", key_display=",", id="dashboard.settings", group=_EVERYWHERE,
                tooltip="Theme, alerts, other hosts and all other settings"),
    ]  # fmt: skip
    HELP = (
        "GPUs above, jobs below. A job runs independently: quitting the app, closing the terminal or losing the "
        "connection does not affect it. A finished job leaves an SAE that SAELens can load; sparsify loads TopK "
        "transcoders."
    )

    AUTO_FOCUS = "JobsPanel"

    def __init__(self, session: Session, view: str) -> None:
        super().__init__(id="dashboard")
        self.session = session
        self.view = view
        self._chosen = False  # True once the user has chosen the view
        self._rows: PanelHeights | None = None
        self._arranged: tuple[PanelHeights, str] | None = None
        self._rested: Timer | None = None
        self._back = LookBack(self, self._read_store)
        self._others = self._of_hosts()

    def _of_hosts(self) -> DashboardHosts | None:
        if self.session.hosts is None:
            return None
        from sae_tui.screens.dashboard_hosts import DashboardHosts

        return DashboardHosts(self, self.session, self.session.hosts)

    async def change_hosts(self) -> None:
        """Show the other hosts that are currently monitored, if any."""
        self._others, self._arranged = None, None
        await self.query("#hosts").remove()
        self.query_one(JobEdits).forget_far()
        if self.session.hosts:
            from sae_tui.panels.far_gpus import FarGpus

            await self.mount(FarGpus(id="hosts", classes="panel"), after="#gpus")
            self._others = self._of_hosts()
        self.show_jobs()
        self.show_gpus()

    def compose(self) -> ComposeResult:
        yield StatusLine(id="status")
        yield AggregatePanel(id="aggregate", classes="panel")
        yield GpuPanel(id="gpus", classes="panel")
        if self._others:
            from sae_tui.panels.far_gpus import FarGpus

            yield FarGpus(id="hosts", classes="panel")
        with Container(id="work"):
            yield JobEdits(self.session, id="finder").add_class("panel")
            yield PreviewPanel(id="preview", classes="panel")
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one(JobsPanel)
        table.focus()
        self.watch(table, "cursor", self._selected, init=False)
        self.show_gpus()
        self.show_jobs()

    def on_screen_resume(self) -> None:
        self.show_gpus()
        self.show_jobs()
        self._selected()

    def on_resize(self) -> None:
        self.show_gpus()

    def show_gpus(self) -> None:
        """Draw the latest samples."""
        if not self.is_mounted:
            return
        monitor = self.session.monitor
        samples = monitor.latest()
        past = self._past(samples)
        withheld = sum(sample.withheld for sample in samples)
        laid = self._arrange(len(samples) - max(0, withheld - 1))
        if laid.totals:
            live = self._back.span_s is None
            sums = (
                self._others.totals(samples, past, live=live)
                if self._others
                else totals(samples, past, self.session.settings)
            )
            self.query_one(AggregatePanel).show_totals(
                sums,
                plot=laid.plot,
                span_s=self._back.span_s if past.is_period else None,
                step_s=monitor.interval_s,
            )
        rows = fold_withheld(
            [
                GpuRow(sample, *holder, partial(past.column, sample.index), settings=self.session.settings)
                for sample, holder in zip(samples, self.session.holders(samples), strict=True)
            ]
        )
        panel = self.query_one(GpuPanel)
        if rows:
            panel.show_gpus(rows, shape=_SHAPES[self._view(len(rows))], space=laid.gpus, lines_each=laid.per_gpu)
        elif monitor.opening:
            panel.show_words(ASKING, "dim")
        else:
            panel.show_words(*self._why_none())
        if self._others:
            self._others.show_gpus(laid.chrome)
        self._title(self._back.span_s if past.is_period else None)
        if any(map(run_time, self.session.jobs)):
            self.query_one(JobEdits).show_jobs(self.session.jobs, self.session.watcher.problem)
        self.query_one(StatusLine).show_status(self.session.status())

    def _why_none(self) -> tuple[str, str]:
        """Return a text explaining why there are no GPUs and what to do, and its style."""
        problem = self.session.monitor.problem
        return (f"{problem[:1].upper()}{problem[1:]}.\n{NO_GPUS}", "warn") if problem else (NO_GPUS, "text")

    def _past(self, samples: Sequence[GpuSample]) -> RecentHistory:
        """Return the history: the latest samples or, once it has been read from the store, a longer span."""
        n = self.size.width
        stored = self._back.stored(" ".join(sample.uuid for sample in samples), n)
        if stored is None or {*stored.slots} != {sample.index for sample in samples}:
            return self.session.monitor.past(n)
        return stored

    def _read_store(self, _: str, span_s: float, n: int) -> RecentHistory:
        data, samples = self.session.data, self.session.monitor.latest()
        return stored_past(data.gpu_db, socket.gethostname(), samples, span_s, n, time.time())

    @on(LookBack.Found)
    def _show_found(self) -> None:
        self.show_gpus()

    def action_longer(self, by: int) -> None:
        self._back.longer(by)
        self.show_gpus()

    @property
    def _n_job_rows(self) -> int:
        n_rows = self._others.n_job_rows if self._others else len(self.session.jobs)
        return n_rows - self.query_one(JobsPanel).n_folded

    def _view(self, n_gpus: int) -> str:
        """Return the view to show.

        Until the user chooses a view, use the map if the GPUs need more than twice the available lines.
        """
        taken = self._others.rows if self._others else 0
        if self._chosen or n_gpus <= 2 * arrange(*self.size, n_gpus=n_gpus, n_jobs=self._n_job_rows, taken=taken).gpus:
            return self.view
        return "map"

    def _arrange(self, n_gpus: int) -> PanelHeights:
        """Compute the rows for each panel; apply them if the layout has changed."""
        view, (width, height) = self._view(n_gpus), self.size
        inside = width - 2 * (frame_of(width, height) == "framed")
        rows = arrange(
            width,
            height,
            n_gpus=_GRIDS[view](n_gpus, inside, height).bands if n_gpus and view in _GRIDS else n_gpus,
            n_jobs=self._n_job_rows,
            is_card_view=view == "per_gpu",
            tiles=view == "map",
            previews=self.query_one(JobsPanel).previewed is not None,
            words=len(self.query_one(GpuPanel).wrapped(self._why_none()[0], inside)),
            taken=self._others.rows if self._others else 0,
        )
        if (rows, view) != self._arranged:
            self._rows, self._arranged = rows, (rows, view)
            self.set_class(rows.beside, "-side-by-side")
            for name, inside in (("aggregate", rows.totals), ("gpus", rows.gpus), ("preview", rows.preview)):
                panel: Widget = self.query_one(f"#{name}")
                panel.display = inside > 0
                panel.styles.height = "1fr" if name == "preview" and rows.beside else inside + rows.chrome
        return rows

    def _title(self, stored_s: int | None) -> None:
        """Write the titles, with each history's time span; `stored_s` is the span read from the store."""
        plotted_s = self.query_one(AggregatePanel).n_columns * self.session.monitor.interval_s
        spans_s = {"aggregate": stored_s or plotted_s, "gpus": stored_s, "finder": None}
        for name, title in (_TITLES | (self._others.titles if self._others else {})).items():
            legend = LEGEND if name == "gpus" and self._arranged and self._arranged[1] == "map" else ""
            span = f" · last {duration(spans_s[name])}" if spans_s[name] else ""
            entitle(self.query_one(f"#{name}"), title + span, legend)
        for panel in self.query("#hosts"):
            entitle(panel, "Other hosts")

    def show_jobs(self) -> None:
        """Draw the latest jobs, and the preview of the job under the cursor."""
        if not self.is_mounted:
            return
        if self._others:
            self._others.show_jobs()
        if not self.session.jobs:
            self.query_one(JobsPanel).show_steps(self._first_steps())
        self.query_one(JobEdits).show_jobs(self.session.jobs, self.session.watcher.problem)
        self.query_one(StatusLine).show_status(self.session.status())
        rows, detail = self._arrange(len(self.session.monitor.latest())), self.session.detail
        if rows.preview and detail is not None and detail.view.id == self.query_one(JobsPanel).previewed:
            self.query_one(PreviewPanel).show_detail(msgspec.structs.replace(detail, member=detail.view.best_sae))

    def _first_steps(self) -> Sequence[Line]:
        monitor = self.session.monitor
        has_gpus = monitor.opening or bool(monitor.latest())
        # Packages in another Python environment are checked only before a launch.
        has_torch = bool(self.session.settings.python) or not missing_of_trainer()
        return first_steps(has_gpus=has_gpus, has_torch=has_torch, readonly=self.session.readonly)

    def _selected(self) -> None:
        self.refresh_bindings()
        if self._rested:
            self._rested.stop()
        self._rested = self.set_timer(_RESTED_S, self._follow_selected)

    def _follow_selected(self) -> None:
        """Have the watcher read the job under the cursor, if there is space for a preview."""
        # Any screen above the dashboard follows its own job. Textual's `is_current` is also True for the screen below a
        # dialog.
        if self.app.screen is self and self._rows and self._rows.preview:
            self.session.watcher.follow(self.query_one(JobsPanel).previewed)

    def select(self, job_id: int | None) -> None:
        """Put the cursor on a job that may not be listed yet."""
        for panel in self.query(JobsPanel):
            panel.select(str(job_id))

    def keys_offered(self) -> FooterOffer:
        """Return the keys to show: first the actions on the job under the cursor, or launching if there is no job."""
        job, readonly = self.query_one(JobEdits).selected, self.session.readonly
        offered = self._offers(job, readonly=readonly)
        verbs = {_IDS.get(verb, f"dashboard.{verb}"): word for verb, word in offered.items()}
        has_jobs = job is not None or self.query_one(JobsPanel).selected_array is not None
        launches = () if readonly else ("dashboard.new",) if has_jobs else _LAUNCHES
        others = ["dashboard.features"] * (job is not None and has_features(self.session.data, job.id))
        others += [*launches, *(["jobs.filter"] if has_jobs else []), "dashboard.view", "dashboard.settings"]
        if self.session.actions.thrown_away:
            others.insert(0, "dashboard.undo")
        hidden = _OF_JOBS.union(_LAUNCHES) if readonly or has_jobs else _OF_JOBS
        if not self.session.monitor.latest():
            others.remove("dashboard.view")
            hidden = hidden | {"dashboard.view"}
        return FooterOffer([*verbs, *others], hidden - {*verbs, *others}, verbs)

    def _offers(self, job: JobView | None, *, readonly: bool) -> Mapping[str, str]:
        """Return the actions on the job or array under the cursor."""
        panel = self.query_one(JobsPanel)
        if array := panel.selected_array:
            return offers_for_array(array, is_open=panel.is_open(array), readonly=readonly)
        return offers_for(job, readonly=readonly) if job else self._others.offers() if self._others else {}

    def action_open_log(self) -> None:
        if self._others and self._others.open_log():
            return
        if job := self.query_one(JobEdits).selected:
            from sae_tui.jobs.view.logs import EVALUATION, n_logs_of
            from sae_tui.screens.log import LogScreen

            source = EVALUATION if job.evaluation else "0"
            self.app.push_screen(LogScreen(self.session, job.id, n_logs_of(job), source))

    def action_open_features(self) -> None:
        job = self.query_one(JobEdits).selected
        if job is None:
            return
        try:
            features_of_job(self.session.data, job.id)
        except UserError as error:
            self.notify(str(error), severity="warning", markup=False)
        else:
            from sae_tui.screens.features import FeaturesScreen

            self.app.push_screen(FeaturesScreen(self.session, job.id, job.best_sae))

    def choose_view(self, view: str) -> None:
        """Show the GPUs in this view."""
        self.view, self._chosen = view, True

    def action_toggle_view(self) -> None:
        views = list(_SHAPES)
        shown = views.index(self._view(len(self.session.monitor.latest())))
        self.view, self._chosen = views[(shown + 1) % len(views)], True
        self.show_gpus()

    def action_open_gpu(self, index: int) -> None:
        if any(sample.index == index for sample in self.session.monitor.latest()):
            from sae_tui.screens.gpu import GpuScreen

            self.app.push_screen(GpuScreen(self.session, index))
        else:
            self.notify(f"There is no GPU {index}.", severity="warning")

    def action_open_processes(self) -> None:
        from sae_tui.screens.processes import ProcessesScreen

        self.app.push_screen(ProcessesScreen(self.session))

    @on(GpuPanel.Chosen)
    def _open_gpu(self, event: GpuPanel.Chosen) -> None:
        self.action_open_gpu(event.index)

    def action_scroll_gpus(self, pages: int) -> None:
        self.query_one(GpuPanel).scroll_gpus(pages)

    def action_open_job(self) -> None:
        if self.query_one(JobsPanel).toggle() or (self._others and self._others.open_log()):
            return
        self._with_selected(self.session.go.open_job)

    def action_stop_job(self) -> None:
        self._act("stop", self.session.actions.stop, self.session.actions.stop_array)

    def action_pause_job(self) -> None:
        self._act("pause", self.session.actions.pause, self.session.actions.pause_array)

    def action_continue_job(self) -> None:
        self._act("continue", self.session.actions.resume, self.session.actions.release_array)

    def action_clone_job(self) -> None:
        self._with_selected(self.session.go.clone_job)

    def action_delete_job(self) -> None:
        self.session.actions.delete(self.query_one(JobEdits).targets)

    def _act(self, verb: str, act: Callable[[int], object], act_on_array: Callable[[ArrayView], object]) -> None:
        """Apply an action to the job or array under the cursor, on the host running the job."""
        if array := self.query_one(JobsPanel).selected_array:
            act_on_array(array)
        elif not (self._others and self._others.act(verb)):
            self._with_selected(act)

    def _with_selected(self, act: Callable[[int], object]) -> None:
        job_id = self.query_one(JobsPanel).selected
        if job_id is not None:
            act(job_id)
        elif self.query_one(JobsPanel).cursor is None:
            self.notify("There is no job yet; n launches one.", severity="warning")

    @on(KeyedTable.Chosen)
    def _open(self) -> None:
        self.action_open_job()

    @on(JobsPanel.Folded)
    def _fold(self) -> None:
        self.show_jobs()
        self.refresh_bindings()
