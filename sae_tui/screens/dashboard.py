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

from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.past import RecentHistory
from sae_tui.gpu.window import stored_past
from sae_tui.jobs.features import features_of_job, has_features
from sae_tui.jobs.view.arrays import ArrayView
from sae_tui.jobs.view.reader import JobView
from sae_tui.panels.aggregate import AggregatePanel, totals
from sae_tui.panels.gpu_row import GpuRow, fold_withheld
from sae_tui.panels.gpus import GpuPanel
from sae_tui.panels.jobs import JOBS, JobsPanel, first_steps, run_time
from sae_tui.panels.preview import PreviewPanel
from sae_tui.panels.status import ASKING, StatusLine
from sae_tui.screens.dashboard_panels import SHAPES, DashboardPanels, DashboardProcesses
from sae_tui.screens.dashboard_rows import PanelHeights
from sae_tui.screens.job_edits import JobEdits
from sae_tui.screens.look_back import LookBack, span_keys
from sae_tui.screens.offers import offers_for, offers_for_array
from sae_tui.session import Session
from sae_tui.widgets.footer import Footer, FooterOffer
from sae_tui.widgets.frame import FramedScreen
from sae_tui.widgets.lines import Line
from sae_tui.widgets.old_keys import old_key
from sae_tui.widgets.table import KeyedTable
from trainer.contract.errors import UserError
from trainer.contract.extras import missing_of_trainer

if TYPE_CHECKING:
    from sae_tui.screens.dashboard_hosts import DashboardHosts

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
# Actions on the job under the cursor, possible while the jobs have the focus.
_ON_JOBS = frozenset(f"{verb}_job" for verb in ("open", "stop", "pause", "continue", "clone", "delete")) | {
    "open_log",
    "open_features",
}
# A job's preview is read once the cursor has stayed on the job for this long.
_RESTED_S = 0.2


class Dashboard(FramedScreen):
    """Shows the GPUs as totals, lines, a card view or a map; the jobs table takes up the remaining rows."""

    BINDINGS = [
        Binding("V", "toggle_view", "View", id="dashboard.view", group=GPUS,
                tooltip="Lines, card view or map"),
        old_key("v", "toggle_view"),
        *(Binding(str(index), f"open_gpu({index})", show=False, group=GPUS, id=f"dashboard.gpu_{index}",
                  key_display="0…9", tooltip="The GPU with this index in full screen" if index == 0 else "")
          for index in range(10)),
        Binding("left_square_bracket", "scroll_gpus(-1)", "GPUs up", key_display="[", show=False, group=GPUS,
                id="dashboard.gpus_up", tooltip="Scroll to the GPUs above"),
        Binding("right_square_bracket", "scroll_gpus(1)", "GPUs down", key_display="]", show=False, group=GPUS,
                id="dashboard.gpus_down", tooltip="Scroll to the GPUs below"),
        *span_keys("dashboard", GPUS, show=False),
        Binding("z", "next_panel", "Panel", show=False, id="dashboard.panel", group=GPUS,
                tooltip="Give the lower half to the processes, the jobs, the GPUs, or all of them"),
        Binding("t", "open_processes", "Processes", show=False, id="dashboard.processes", group=GPUS,
                tooltip="GPU processes: user, memory, command; send signals"),
        Binding("n", "app.new_job", "New job", id="dashboard.new", group=JOBS,
                tooltip="Choose GPUs and launch a job"),
        Binding("X", "app.new_job('extract')", "Extract", id="dashboard.extract", group=JOBS,
                tooltip="Extract activations of a language model to train on"),
        old_key("e", "app.new_job('extract')"),
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
                tooltip="A new job with this one's settings"),
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
        self.panels = DashboardPanels(self, session, view)
        self._rested: Timer | None = None
        self._back = LookBack(self, self._read_store)
        self.panels.others = self._of_hosts()

    @property
    def _others(self) -> DashboardHosts | None:
        """The object that draws the other hosts, or None if none are monitored."""
        return self.panels.others

    def _of_hosts(self) -> DashboardHosts | None:
        if self.session.hosts is None:
            return None
        from sae_tui.screens.dashboard_hosts import DashboardHosts

        return DashboardHosts(self, self.session, self.session.hosts)

    async def change_hosts(self) -> None:
        """Show the other hosts that are currently monitored, if any."""
        self.panels.others = None
        self.panels.forget()
        await self.query("#hosts").remove()
        self.query_one(JobEdits).forget_far()
        if self.session.hosts:
            from sae_tui.panels.far_gpus import FarGpus

            await self.mount(FarGpus(id="hosts", classes="panel"), after="#gpus")
            self.panels.others = self._of_hosts()
        self.show_jobs()
        self.show_gpus()

    def compose(self) -> ComposeResult:
        yield StatusLine(id="status")
        yield AggregatePanel(id="aggregate", classes="panel")
        yield GpuPanel(id="gpus", classes="panel")
        yield DashboardProcesses(self.session, id="work-processes").add_class("panel")
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
        self.query_one(JobEdits).open_elsewhere = lambda action: bool(self._others and self._others.open(action))
        self.watch(table, "cursor", self._selected, init=False)
        self.show_gpus()
        self.show_jobs()

    def on_screen_resume(self) -> None:
        self.show_gpus()
        self.show_jobs()
        self._selected()

    def on_screen_suspend(self) -> None:
        processes = self.query_one(DashboardProcesses)
        if not processes.is_covered:  # a process's page shows the shares
            processes.rest()

    def on_resize(self) -> None:
        self.show_gpus()
        self.show_jobs()  # a frame may have gained or lost its corners, which changes the title of the preview

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
            panel.show_gpus(
                rows,
                shape=SHAPES[self.panels.view_of(len(rows))],
                space=laid.gpus,
                lines_each=laid.per_gpu,
            )
        elif monitor.opening:
            panel.show_words(ASKING, "dim")
        else:
            panel.show_words(*self.panels.why_no_gpus())
        if self._others:
            self._others.show_gpus(laid.chrome)
        self.query_one(DashboardProcesses).show_all(samples)
        self.panels.entitle(self._back.span_s if past.is_period else None)
        if any(map(run_time, self.session.jobs)):
            self.query_one(JobEdits).show_jobs(self.session.jobs, self.session.watcher.problem)
        self.query_one(StatusLine).show_status(self.session.status())

    def _arrange(self, n_gpus: int) -> PanelHeights:
        """Set the panel heights; if there is now space for a preview, start reading the job under the cursor."""
        before, rows = self.panels.rows, self.panels.apply(n_gpus)
        if rows.preview and not (before and before.preview):
            self._selected()
        return rows

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

    @on(DashboardProcesses.Read)
    def _make_space(self) -> None:
        """Change the layout as soon as the number of processes changes."""
        if self.query_one(DashboardProcesses).count_rows():
            self.show_gpus()

    @on(LookBack.Found)
    def _show_found(self) -> None:
        self.show_gpus()

    def action_longer(self, by: int) -> None:
        self._back.longer(by)
        self.show_gpus()

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
        """Have the watcher read the job under the cursor, or no job if there is no space for a preview."""
        # Any screen above the dashboard follows its own job. Textual's `is_current` is also True for the screen below a
        # dialog.
        if self.app.screen is self and self.panels.rows:
            previewed = self.query_one(JobsPanel).previewed if self.panels.rows.preview else None
            self.session.watcher.follow(previewed)

    def select(self, job_id: int | None) -> None:
        """Put the cursor on a job that may not be listed yet."""
        for panel in self.query(JobsPanel):
            panel.select(str(job_id))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow actions on a job only while no other panel has the focus."""
        if action in _ON_JOBS and self.focused is not None:
            return self.query_one(JobEdits) in self.focused.ancestors
        return super().check_action(action, parameters)

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
        if self._others and self._others.open("open_features"):
            return
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
        self.panels.choose_view(view)

    def action_toggle_view(self) -> None:
        self.panels.next_view(len(self.session.monitor.latest()))
        self.show_gpus()

    def action_next_panel(self) -> None:
        self.panels.next_lower(len(self.session.monitor.latest()))
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
        if self.query_one(JobsPanel).toggle() or (self._others and self._others.open()):
            return
        self._with_selected(self.session.go.open_job)

    def action_stop_job(self) -> None:
        self._act("stop", self.session.actions.stop, self.session.actions.stop_array)

    def action_pause_job(self) -> None:
        self._act("pause", self.session.actions.pause, self.session.actions.pause_array)

    def action_continue_job(self) -> None:
        self._act("continue", self.session.actions.resume, self.session.actions.release_array)

    def action_clone_job(self) -> None:
        if self._others and self._others.open("clone_job"):
            return
        self._with_selected(self.session.go.clone_job)

    def action_delete_job(self) -> None:
        edits = self.query_one(JobEdits)
        if edits.targets or not edits.refuse_elsewhere("rm ID"):
            self.session.actions.delete(edits.targets)

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
