"""The app: it owns the sampler and the watcher, and wires them to the screens; no layout is here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import msgspec
from rich.console import RenderableType
from textual import on, work
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.app import SystemCommand
from textual.binding import Binding
from textual.css.query import NoMatches
from textual.driver import Driver
from textual.geometry import Size
from textual.screen import Screen
from textual.widgets import Input, TextArea
from textual.worker import get_current_worker

from sae_tui.doctor.base import Box, Finding
from sae_tui.doctor.examine import CHECKS, PROBES, Check, examine
from sae_tui.gpu import faults
from sae_tui.gpu.monitor import Monitor
from sae_tui.jobs.cards.occupancy import Occupancy, gpu_source
from sae_tui.jobs.launch.clone import cloned
from sae_tui.jobs.states import ENDED
from sae_tui.jobs.view.reader import JobView
from sae_tui.jobs.view.watcher import Watcher
from sae_tui.jobs.wording import plural
from sae_tui.messages import Done, JobsChanged, Launched
from sae_tui.notices import Notices
from sae_tui.palette import Commands, JobCommands, Palette, of_keys
from sae_tui.screens.dashboard import Dashboard
from sae_tui.screens.doctor import DoctorScreen
from sae_tui.screens.help import HelpScreen, settings_lines
from sae_tui.screens.job import JobScreen
from sae_tui.screens.launch import LaunchScreen
from sae_tui.screens.launch_form import Origin
from sae_tui.session import Session
from sae_tui.settings import Settings, change_setting
from sae_tui.terminal.driver import TerminalDriver
from sae_tui.terminal.key_order import KeysInOrder
from sae_tui.terminal.painter import Painter, Printable
from sae_tui.theme import DARK, LIGHT, THEMES, shown_theme
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.reading import Reading
from trainer.contract.errors import Problem, UserError, sentence
from trainer.contract.paths import DataDir
from trainer.contract.printable import printable
from trainer.contract.settings.job import JobConfig
from trainer.contract.store.states import JobState

_LAUNCH = "launch"  # installed, so that a half-filled form is still there after a look at the dashboard


class SaeApp(KeysInOrder, Notices):
    """Monitors GPUs and launches jobs; a job never depends on the app being there."""

    CSS_PATH = "app.tcss"
    TITLE = "sae-tui"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS = {Commands, JobCommands}
    BINDINGS = [
        Binding("q", "quit", "Quit", id="app.quit", tooltip="Leave; jobs keep running"),
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True),
        Binding("question_mark", "help", "Help", key_display="?", id="app.help", tooltip="What the keys do"),
        Binding("ctrl+p", "command_palette", "Commands", show=False, priority=True, id="app.commands",
                tooltip="Find what can be done, or a job, by a few letters"),
        # In a text field, which takes the question mark, the footer shows this one.
        Binding("f1", "help", "Help", key_display="F1", show=False, id="app.help_in_text", tooltip="What the keys do"),
        Binding("exclamation_mark", "notices", "Messages", key_display="!", show=False, id="app.notices",
                tooltip="What the app has said lately, in full"),
        Binding("d", "doctor", "Doctor", show=False, id="doctor", tooltip="What is in the way of a training here"),
    ]  # fmt: skip
    BEFORE_TEXT = frozenset({"jobs.filter", "jobs.tag", "jobs.rename", "jobs.note", "jobs.after", "logs.search"})
    VERTICAL_BREAKPOINTS = [(0, "-short"), (35, "-tall")]

    def __init__(
        self,
        data: DataDir,
        monitor: Monitor,
        settings: Settings,
        problems: Iterable[Problem] = (),
        first_words: str = "",
    ) -> None:
        super().__init__()
        # Each small step of an animated scroll is a frame, which a slow line delays.
        self.animation_level = "none"
        watcher = Watcher(data, lambda: self.post_message(JobsChanged()))
        self.session = Session(data, monitor, watcher, settings, self)
        self._filters.append(Printable())
        self._painter = Painter()
        self._held: dict[str, int] = {}
        self._whole: tuple[Screen[object], Size] | None = None  # what was painted whole last, and how large
        self._settings_problems = tuple(problems)
        self._first_words = first_words
        self._dashboard = Dashboard(self.session, settings.monitor_view_default)

    def get_driver_class(self) -> type[Driver]:
        driver = super().get_driver_class()
        return TerminalDriver if issubclass(TerminalDriver, driver) else driver

    # life

    def on_mount(self) -> None:
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        self.theme = shown_theme(self.session.settings.theme, self.console.color_system)
        self.session.monitor.start()
        self.session.watcher.start()
        self.push_screen(self._dashboard)
        self.set_interval(self.session.settings.sampling_interval_s, self._tick)
        self._first_look = self.set_interval(0.03, self._look_first, repeat=60)
        if self._first_words:
            self.notify(self._first_words, markup=False)
        for problem in self._settings_problems:
            self.notify(str(problem), title="Settings", severity="error", markup=False)

    def on_unmount(self) -> None:
        self.session.watcher.stop()
        self.session.monitor.stop()

    def _look_first(self) -> None:
        """Draw as soon as the first samples are there, rather than a whole interval later."""
        monitor = self.session.monitor
        samples = monitor.latest()
        answered = samples and all(sample.reason != faults.NO_ANSWER_YET for sample in samples)
        if answered or monitor.problem:
            self._first_look.stop()
            self._tick()

    def _tick(self) -> None:
        self._draw("show_gpus")

    @on(JobsChanged)
    def _jobs_changed(self) -> None:
        for job in self.session.actions.newly_ended():
            self._tell_end(job)
        self._draw("show_jobs")
        held = {uuid: job.id for uuid, job in self.session.watcher.holders.jobs.items()}
        if held != self._held:
            # A card is named after its job as soon as the job is, not at the next sample.
            self._held = held
            self._draw("show_gpus")
        self._draw("refresh_bindings")

    def _draw(self, method: str) -> None:
        """Call `method` on every visible screen that has it; its widgets may be gone already while the app closes."""
        for screen in self._in_sight():
            if show := getattr(screen, method, None):
                with contextlib.suppress(NoMatches):
                    show()

    def _in_sight(self) -> Iterable[Screen[object]]:
        """Yield the screen on top, and behind a dialog the screens that show through."""
        for screen in reversed(self.screen_stack):
            yield screen
            if not screen.is_modal:
                return

    def _tell_end(self, job: JobView) -> None:
        """Notify that a job has ended; ring the bell or send a desktop note (OSC 9) as `settings.notify` says."""
        message = f"Job {job.id} ({job.name}) {ENDED[job.state]}" + (f": {job.error}" if job.error else "")
        bad = job.state in (JobState.FAILED, JobState.LOST)
        self.notify(message, severity="error" if bad else "information", markup=False)
        how = self.session.settings.notify
        if how == "bell":
            self.bell()
        elif how == "terminal" and self._driver is not None:
            self._driver.write(f"\x1b]9;{printable(message)}\x07")

    # what actions ask of it

    def ask(self, question: str, yes: str, then: Callable[[], object]) -> None:
        """Ask a question, with `yes` as the label of that button; call `then` where the answer is yes."""
        self.push_screen(Confirm(question, yes=yes), lambda answer: then() if answer else None)

    @work(thread=True, group="actions", exit_on_error=False)
    def do(self, act: Callable[[], str]) -> None:
        """Run `act` on a thread, and notify of the sentence it returns or of the `UserError` or `OSError` it raises."""
        try:
            self.post_message(Done(act()))
        except (UserError, OSError) as error:
            self.post_message(Done(sentence(error), failed=True))

    @on(Done)
    def _done(self, event: Done) -> None:
        text = event.text[:1].upper() + event.text[1:]
        text += "" if text.endswith((".", "!", "?")) else "."
        self.notify(text, severity="error" if event.failed else "information", markup=False)
        self.session.watcher.poke()

    # actions

    def clone_job(self, job_id: int) -> None:
        """Open the launch screen with a job's settings; halve the batch where the job ran out of GPU memory."""
        actions, data = self.session.actions, self.session.data
        job = actions.job(job_id)
        if job is None:
            return
        try:
            was = cloned(data, job_id)
            config = cloned(data, job_id, actions.half_batch(job, was))
        except UserError as error:
            self.notify(str(error), title="Not cloned", severity="error", markup=False)
            return
        form = LaunchScreen(self.session, Origin(job_id, was, config))
        if self._changes:
            question = f"A draft with {plural(self._changes, 'changed setting')} is kept. Replace it by the clone?"
            self.push_screen(Confirm(question, yes="Replace"), lambda yes: self._open_form(form) if yes else None)
        else:
            self._open_form(form)

    def _open_form(self, form: LaunchScreen) -> None:
        self.show_dashboard()
        self._forget_form()
        self.install_screen(form, _LAUNCH)
        self.switch_to(_LAUNCH)

    @property
    def _changes(self) -> int:
        """The number of settings that were changed by hand in the kept form."""
        return len(self.get_screen(_LAUNCH, LaunchScreen).form.changed) if self.is_screen_installed(_LAUNCH) else 0

    def action_new_job(self) -> None:
        if self.is_screen_installed(_LAUNCH):
            self.switch_to(_LAUNCH)
            self.get_screen(_LAUNCH, LaunchScreen).form.tell_draft()
        else:
            self._open_form(LaunchScreen(self.session))

    def action_show_dashboard(self) -> None:
        self.show_dashboard()

    def action_command_palette(self) -> None:
        if not Palette.is_open(self):
            self.push_screen(Palette())

    def action_undo_delete(self) -> None:
        self.session.actions.undo_delete()

    def action_help(self) -> None:
        self.push_screen(HelpScreen(self.screen))

    def action_help_quit(self) -> None:
        """Say which key quits, since ctrl+c does not: ctrl+q where `q` could be typed as a letter, else q."""
        types = isinstance(self.focused, (Input, TextArea)) or self.screen.is_modal
        self.notify(f"Press {'ctrl+q' if types else 'q'} to quit; jobs keep running.")

    def action_doctor(self) -> None:
        self.switch_to(DoctorScreen(self._run_checks, lambda: self._run_checks((*CHECKS, *PROBES))))

    def _run_checks(self, checks: Iterable[Check] = CHECKS) -> Iterable[Finding]:
        """Run the checks on a GPU source of their own, since the monitor's is in use."""
        monitor, data = self.session.monitor, self.session.data
        source = gpu_source(monitor.source_name, Occupancy(data), count=len(monitor.latest()) or None)
        return examine(Box(data, source), checks)

    def choose_theme(self, name: Literal["dark", "light", "terminal"]) -> None:
        """Change the colours now, and in the settings file for the next start."""
        self.session.settings = msgspec.structs.replace(self.session.settings, theme=name)
        self.theme = shown_theme(name, self.console.color_system)
        try:
            change_setting(self.session.data.settings_file, "theme", name)
        except (UserError, OSError) as error:
            self.notify(sentence(error), title="Theme not kept", severity="error", markup=False)

    def show_settings(self) -> None:
        session = self.session
        self.push_screen(Reading("Settings", lambda width: settings_lines(session.settings, session.data, width)))

    def show_dashboard(self) -> None:
        """Go back to the first screen, and follow no job any more."""
        self.session.watcher.follow(None)
        while self.screen is not self._dashboard:
            self.pop_screen()

    def switch_to(self, screen: Screen[None] | str) -> None:
        """Show a screen above the dashboard, in place of any other."""
        self.show_dashboard()
        self.push_screen(screen)

    def open_job(self, job_id: int) -> None:
        self.switch_to(JobScreen(self.session, job_id))
        self.session.watcher.follow(job_id, 0)

    def launch(self, jobs: Sequence[JobConfig], parent: int | None = None) -> None:
        """Launch checked jobs in the background and go back to the dashboard."""
        self.show_dashboard()
        self._launch(tuple(jobs), parent)

    @work(thread=True, group="actions", exit_on_error=False)
    def _launch(self, jobs: tuple[JobConfig, ...], parent: int | None) -> None:
        actions, worker = self.session.actions, get_current_worker()
        try:
            job_ids = actions.launch(jobs, parent)
        except (UserError, OSError) as error:
            self.post_message(Launched(None, sentence(error)))
            return
        self.post_message(Launched(job_ids[-1]))
        with contextlib.suppress(UserError):  # a job that was deleted meanwhile needs no message
            self.post_message(Done(actions.tell_launched(job_ids, lambda: worker.is_cancelled)))

    @on(Launched)
    def _launched(self, event: Launched) -> None:
        failed = event.job_id is None
        if failed:
            self.action_new_job()
            self.notify(event.text, title="Not launched", severity="error", markup=False)
        else:
            self._forget_form()
            self._dashboard.select(event.job_id)
        self.session.watcher.poke()

    def _forget_form(self) -> None:
        """Discard the form unless it is on a screen, so that the next job starts from a fresh one."""
        if self.is_screen_installed(_LAUNCH) and (filled := self.get_screen(_LAUNCH)) not in self.screen_stack:
            self.uninstall_screen(_LAUNCH)
            filled.remove()

    def _display(self, screen: Screen[object], renderable: RenderableType | None) -> None:
        """Send partial updates through the painter; after a larger one, have it forget what the terminal shows."""
        if isinstance(renderable, ChopsUpdate):
            renderable = self._painter.lean(renderable)
        elif isinstance(renderable, LayoutUpdate) and screen.is_modal and self._whole == (screen, screen.size):
            # Textual 8.2 repaints the whole screen whenever something changes behind a dialog, 18 KB a second.
            renderable = self._painter.lean_whole(renderable)
        elif renderable is not None:
            self._painter.forget()
            self._whole = (screen, screen.size)
        super()._display(screen, renderable)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield the commands of the palette, except those that are found by a job's name or number."""
        yield SystemCommand("New job", "Choose GPUs and launch a training", self.action_new_job)
        yield SystemCommand("Dashboard", "All GPUs and jobs", self.show_dashboard)
        yield SystemCommand("Doctor", "What is in the way of a training here", self.action_doctor)
        for name in THEMES:
            yield SystemCommand(f"Theme: {name}", "Colours, kept in settings.toml", partial(self.choose_theme, name))
        yield SystemCommand("Settings", "What they are, and where to change them", self.show_settings)
        yield SystemCommand("Help", "What the keys do", self.action_help)
        yield SystemCommand("Quit", "Leave; jobs keep running", self.action_quit)
        yield from of_keys(screen, ("New job", "Dashboard", "Doctor", "Help", "Quit", "Back", "Close", "Commands"))
