"""The screen for one job: its state, curves, events and log, updated live."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widget import Widget

from sae_tui.jobs.energy import energy_words
from sae_tui.jobs.features import has_features
from sae_tui.jobs.launch.clone import has_secrets, launch_line
from sae_tui.jobs.launch.exporting import loading_snippets
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.view.logs import EVALUATION, n_logs_of
from sae_tui.jobs.view.program_use import ProgramReader, ProgramUse
from sae_tui.jobs.view.reader import JobView
from sae_tui.jobs.watched import has_watched
from sae_tui.panels.curves import members_of
from sae_tui.panels.registry import PANELS, Place
from sae_tui.screens.card import CardScreen
from sae_tui.screens.compare import CompareScreen, is_sweep
from sae_tui.screens.evaluate import Evaluates
from sae_tui.screens.export import ExportDialog
from sae_tui.screens.features import FeaturesScreen
from sae_tui.screens.log import LogScreen
from sae_tui.screens.metrics import MetricsScreen
from sae_tui.screens.offers import offers_for
from sae_tui.screens.watched import WatchedScreen
from sae_tui.session import Session
from sae_tui.widgets.footer import Footer, FooterOffer
from sae_tui.widgets.frame import FramedScreen
from sae_tui.widgets.old_keys import old_key
from sae_tui.widgets.reading import LinesScreen
from trainer.contract.errors import UserError

if TYPE_CHECKING:
    from sae_tui.jobs.view.watcher import JobDetail


# The most useful keys, shown first in the footer.
_KEYS = [
    f"job.{name}"
    for name in (
        "back",
        "stop",
        "pause",
        "continue",
        "card",
        "features",
        "watched",
        "evaluate",
        "export",
        "log",
        "metrics",
        "all_metrics",
        "clone",
        "load",
        "copy",
    )
]
_USE_EVERY_S = 3.0
_OF_SAES = frozenset(("evaluate", "open_card", "open_features", "open_watched", "export", "copy_snippet", "next_rank"))
_BESIDE_FROM = 120  # minimum width to show the settings next to the other panels


class JobScreen(Evaluates, FramedScreen):
    """Follows one job. Each panel draws from the job details kept up to date by the watcher."""

    BINDINGS = [
        Binding("escape", "app.pop_screen", "Back", id="job.back", tooltip="To the previous screen"),
        Binding("s", "stop_job", "Stop", id="job.stop",
                tooltip="Stop, saving a checkpoint if it trains; press again to kill it now"),
        Binding("p", "pause_job", "Pause", id="job.pause",
                tooltip="Stop and free the GPUs until you resume the job; training saves first"),
        Binding("g", "continue_job", "Resume", id="job.continue",
                tooltip="Resume from a checkpoint, run a command again, or release a held job"),
        Binding("y", "clone_job", "Clone", id="job.clone", tooltip="A new job with this one's settings"),
        Binding("l", "open_log", "Log", id="job.log", tooltip="The logs in full screen: follow, search, filter"),
        Binding("v", "open_card", "Card", id="job.card", tooltip="The report card of its SAE: all measurements"),
        Binding("f", "open_features", "Features", id="job.features",
                tooltip="Max-activating examples of its latents"),
        Binding("W", "open_watched", "Watched", id="job.watched",
                tooltip="Snapshots of the latents that it watches while it trains"),
        Binding("e", "evaluate", "Evaluate", id="job.evaluate",
                tooltip="Choose what to measure: rows, in the model, probes"),
        Binding("right_square_bracket", "next_rank(1)", "Rank", key_display="]", id="job.rank",
                tooltip="Show the log of the next rank"),
        Binding("left_square_bracket", "next_rank(-1)", "Previous rank", key_display="[", show=False,
                id="job.rank_before", tooltip="Show the log of the previous rank"),
        old_key("r", "next_rank(1)"),
        Binding("m", "next_member(1)", "SAE", id="job.member", tooltip="Show the next SAE in the sweep"),
        Binding("M", "next_member(-1)", "Previous SAE", show=False, id="job.member_before",
                tooltip="Show the previous SAE in the sweep"),
        Binding("i", "toggle_settings", "Info", id="job.settings", tooltip="Its settings, tags and note"),
        Binding("enter", "open_defaults", "Defaults", show=False, id="job.defaults",
                tooltip="Show or hide the settings at their defaults"),
        Binding("a", "open_metrics", "All metrics", id="job.all_metrics",
                tooltip="All metrics at once: find, zoom, read values"),
        Binding("b", "compare", "Curve", id="job.metrics",
                tooltip="A big curve: choose the metric, the axis (steps, tokens, time), the smoothing and the scale"),
        old_key("c", "compare"),
        Binding("Y", "copy_command", "Copy", id="job.copy", tooltip="Copy the command that launches the same job"),
        Binding("L", "copy_snippet", "Load", id="job.load",
                tooltip="Show and copy Python that loads its SAE: SAELens or sparsify, then safetensors"),
        Binding("x", "export", "Export", id="job.export", tooltip="Write its SAE for other tools"),
    ]  # fmt: skip
    DEFAULT_CSS = """
    JobScreen SettingsPanel { display: none; }
    JobScreen.-settings SettingsPanel { display: block; }
    JobScreen.-settings #live { display: none; }
    JobScreen.-settings.-side-by-side SettingsPanel { width: 42; }
    JobScreen.-settings.-side-by-side #live { display: block; width: 1fr; }
    JobScreen #middle { height: 1fr; min-height: 5; max-height: 10; }
    JobScreen.-bare #middle { min-height: 3; max-height: 8; }
    JobScreen #log-box { height: 1fr; min-height: 3; }
    JobScreen.-failed.-short #curves, JobScreen.-failed.-blank #curves { display: none; }
    JobScreen.-program #middle { height: auto; min-height: 4; max-height: 8; }
    JobScreen.-program.-tall #middle { max-height: 12; }
    JobScreen.-program #middle > * { height: 100%; }
    JobScreen.-failed.-program.-short #program-curves { display: none; }
    """

    def __init__(self, session: Session, job_id: int) -> None:
        super().__init__(name="job")
        self.session = session
        self.job_id = job_id
        self._panels = {name: entry.make(name) for name, entry in PANELS.items()}
        # None until the user chooses a rank. Until then, the log of rank 0 or of the failed rank is shown.
        self._rank: int | None = None
        self.member = ""
        self._n_copied = 0  # how many snippets have been copied
        self._program = ProgramReader(session.data, job_id)
        self._one_reading = threading.Lock()
        self._use: ProgramUse | None = None
        # None until the user toggles the settings. Until then, they are shown if the window is wide enough.
        self._settings: bool | None = None

    def compose(self) -> ComposeResult:
        yield from self._panels_at("top")
        with Horizontal(id="body"):
            with Vertical(id="live"):
                yield from self._panels_at("live")
                with Horizontal(id="middle"):
                    yield from self._panels_at("middle")
                with Vertical(id="log-box"):
                    yield from self._panels_at("bottom")
            yield from self._panels_at("side")
        yield Footer()

    def _panels_at(self, place: Place) -> list[Widget]:
        return [self._panels[name] for name, entry in PANELS.items() if entry.place == place]

    def on_mount(self) -> None:
        self._arrange()
        self._panels["log"].focus()
        self.show_jobs()
        self.set_interval(_USE_EVERY_S, self._read_use)

    def on_resize(self) -> None:
        self._arrange()
        self.show_jobs()

    def on_screen_resume(self) -> None:
        """Follow the job (the screen above may have followed another job), and redraw the screen."""
        self.session.watcher.follow(self.job_id, self.log_rank)
        self.show_jobs()

    @property
    def shows_settings(self) -> bool:
        is_wide = self.size.width >= _BESIDE_FROM
        return is_wide if self._settings is None else self._settings

    @property
    def log_rank(self) -> int:
        return self._rank or 0

    def _arrange(self) -> None:
        """Show the settings next to the other panels or, if the window is too narrow, instead of them."""
        self.set_class(self.size.width >= _BESIDE_FROM, "-side-by-side")
        self.set_class(self.shows_settings, "-settings")

    def show_gpus(self) -> None:
        """Do nothing because this screen shows no GPUs."""

    def show_jobs(self) -> None:
        """Draw the current state of the job."""
        detail = self.session.detail
        if not self.is_mounted or detail is None or detail.view.id != self.job_id:
            return
        self._arrange_program(detail)
        self.set_class(detail.postmortem is not None, "-failed")
        self.set_class(not detail.series, "-blank")
        self._follow_failed(detail)
        members = members_of(detail)
        if self.member not in members and (self.member or members):
            self.member = detail.view.best_sae if detail.view.best_sae in members else next(iter(members), "")
            self.refresh_bindings()
        shown = msgspec.structs.replace(
            detail,
            member=self.member,
            energy=energy_words(detail.view, self.session.settings),
            use=self._use,
        )
        for panel in self._panels.values():
            panel.show_detail(shown)

    def _arrange_program(self, detail: JobDetail) -> None:
        """For a command, leave most of the screen to its log, and read its resource use."""
        is_program = kind_of(detail.view.config).is_program
        self.set_class(is_program, "-program")
        if is_program and self._use is None:
            self._read_use()
        if is_program:
            self.query_one("#middle").styles.height = 3 + len(detail.view.gpu_ids) * (
                2 if self.size.height >= 35 else 1
            )

    def _read_use(self) -> None:
        """Read the command's resource use in a thread, unless the previous read is still in progress."""
        detail = self.session.detail
        is_due = detail and detail.view.id == self.job_id and (self._use is None or not detail.view.state.is_final)
        if detail and is_due and self.has_class("-program") and not self._one_reading.locked():
            read = functools.partial(self._read_in_thread, detail)
            self.run_worker(read, thread=True, group="program", exit_on_error=False)

    def _read_in_thread(self, detail: JobDetail) -> None:
        with self._one_reading:
            self._use = self._program.read(detail.view, detail.ranks)
        self.app.call_later(self.show_jobs)

    def _follow_failed(self, detail: JobDetail) -> None:
        """Show the log from the failed rank, unless the user chose another rank."""
        if detail.postmortem and self._rank is None:
            self._rank = detail.postmortem.rank or 0
            self.session.watcher.follow(self.job_id, self._rank)

    def keys_offered(self) -> FooterOffer:
        """Return the keys to show: only actions possible in the job's state."""
        detail = self.session.detail
        if detail is None or detail.view.id != self.job_id:
            return FooterOffer()
        verbs = offers_for(detail.view, readonly=self.session.readonly)
        hidden = {f"job.{verb}" for verb in ("stop", "pause", "continue") if verb not in verbs}
        hidden |= {"job.clone", "job.evaluate", "job.export"} if self.session.readonly else set()
        job, data = detail.view, self.session.data
        has_sae = kind_of(job.config).trains and data.exported_folder(job.id) is not None
        # A report card exists only for a finished SAE.
        hidden |= set() if has_sae and job.state.is_final else {"job.evaluate", "job.card", "job.export", "job.load"}
        hidden |= {"job.evaluate"} if job.evaluation else set()
        hidden |= set() if has_features(data, self.job_id) else {"job.features"}
        hidden |= set() if has_watched(data.run(self.job_id).root) else {"job.watched"}
        hidden |= set() if n_logs_of(job) > 1 else {"job.rank"}
        is_program = kind_of(job.config).is_program
        hidden |= {"job.metrics", "job.all_metrics"} if is_program and not detail.series else set()
        words = {f"job.{verb}": word for verb, word in verbs.items()}
        words["job.metrics"] = "Curves" if is_sweep(job) else "Curve"
        words["job.settings"] = "Settings" if self.has_class("-side-by-side") else "Info"
        # In a sweep, the other SAEs come before what can be done with this one.
        first = [*_KEYS[:1], "job.member", *_KEYS[1:]] if is_sweep(job) else _KEYS
        return FooterOffer(first, frozenset(hidden), words)

    def action_stop_job(self) -> None:
        self.session.actions.stop(self.job_id)

    def action_pause_job(self) -> None:
        self.session.actions.pause(self.job_id)

    def action_continue_job(self) -> None:
        self.session.actions.resume(self.job_id)

    def action_clone_job(self) -> None:
        self.session.go.clone_job(self.job_id)

    def action_open_metrics(self) -> None:
        self.app.push_screen(MetricsScreen(self.session, self.job_id))

    def action_open_log(self) -> None:
        detail = self.session.detail
        if detail and detail.view.id == self.job_id:
            n_ranks = n_logs_of(detail.view)
            # The job may have been resumed on fewer ranks.
            source = EVALUATION if detail.view.evaluation else str(min(self.log_rank, n_ranks - 1))
            self.app.push_screen(LogScreen(self.session, self.job_id, n_ranks, source))

    def action_evaluate(self) -> None:
        self.ask_to_evaluate()

    def action_export(self) -> None:
        detail = self.session.detail
        if detail and detail.view.id == self.job_id and not self.session.actions.refused():
            self.app.push_screen(ExportDialog(self.session, detail.view))

    def action_copy_command(self) -> None:
        """Copy the command that launches the same job."""
        detail = self.session.detail
        if detail is None or detail.view.id != self.job_id:
            return
        secret = has_secrets(detail.view.config)
        if secret and self.session.readonly:
            self.notify("The command may contain secrets, and this view is read-only.", severity="warning")
            return
        try:
            line = self._launch_line(detail.view)
        except UserError as error:
            self.notify(str(error), severity="warning", markup=False)
            return
        self.app.copy_to_clipboard(line)
        also = " It may contain secrets." * secret
        place = self.session.place
        self.notify(f"The command that launches this job{place} was sent to the terminal's clipboard.{also}")

    def _launch_line(self, view: JobView) -> str:
        return launch_line(view.config, view.name)

    def action_copy_snippet(self) -> None:
        """Show and copy Python code that loads the SAE; pressing the key again shows the next way to load it."""
        snippets = loading_snippets(self._sae_folder)
        if not snippets:
            self.notify(f"Job {self.job_id} has no SAE to load yet.", severity="warning")
            return
        snippet = snippets[self._n_copied % len(snippets)]
        self._n_copied += 1
        other = snippets[self._n_copied % len(snippets)].library
        self.app.copy_to_clipboard(snippet.code)
        title = f"Load the SAE with {snippet.library}; sent to the terminal's clipboard"
        code = [((line, "text"),) for line in snippet.code.splitlines()]
        more = [((" ", "text"),), ((f"Close this and press L again to load it with {other}.", "dim"),)]
        self.app.push_screen(LinesScreen(title, lambda _: [*code, *(more if len(snippets) > 1 else [])]))

    @property
    def _sae_folder(self) -> Path:
        """The folder of the SAE or, in a sweep, of the SAE that is shown."""
        folder = self.session.data.sae(self.job_id)
        return folder / self.member if self.member else folder

    def action_open_card(self) -> None:
        self.app.push_screen(CardScreen(self.session, self.job_id, self.member))

    def action_open_features(self) -> None:
        self.app.push_screen(FeaturesScreen(self.session, self.job_id, self.member))

    def action_open_watched(self) -> None:
        if has_watched(self.session.data.run(self.job_id).root):
            self.app.push_screen(WatchedScreen(self.session, self.job_id, self.member))
        else:
            message = "This job has stored no snapshots of latents; train.watch_latents stores some."
            self.notify(message, severity="warning", markup=False)

    def action_next_rank(self, by: int) -> None:
        detail = self.session.detail
        if detail and detail.view.id == self.job_id:
            self._rank = (self.log_rank + by) % n_logs_of(detail.view)
            self.session.watcher.follow(self.job_id, self._rank)

    def action_next_member(self, by: int) -> None:
        detail = self.session.detail
        members = members_of(detail) if detail and detail.view.id == self.job_id else []
        if self.member in members:
            self.member = members[(members.index(self.member) + by) % len(members)]
            self.show_jobs()

    def action_toggle_settings(self) -> None:
        self._settings = not self.shows_settings
        self._arrange()
        self._panels["settings" if self._settings else "log"].focus()

    def action_open_defaults(self) -> None:
        if not self.shows_settings:
            self.action_toggle_settings()
        self._panels["settings"].toggle_defaults()
        self._panels["settings"].focus()

    def action_compare(self) -> None:
        """Open the large curve and, for a sweep, also the differences between its SAEs."""
        detail = self.session.detail
        is_one = detail is not None and detail.view.id == self.job_id and not is_sweep(detail.view)
        self.app.push_screen(CompareScreen(self.session, [self.job_id], only_curves=is_one))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the key for switching between SAEs only for a sweep, and keys for SAEs only if the job trains."""
        if action in _OF_SAES and self.has_class("-program"):
            return False
        return action != "next_member" or bool(self.member)
