"""The app class: connects the screens, the background threads and the actions on jobs. It contains no layout."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from textual import on
from textual.app import SystemCommand
from textual.binding import Binding
from textual.css.query import NoMatches
from textual.driver import Driver
from textual.filter import Monochrome
from textual.screen import Screen
from textual.widgets import Input, TextArea

from sae_tui.alerts.watch import AlertWatcher
from sae_tui.app_parts.refresh import AlertsChanged, JobsChanged, MakeHosts, Refresh
from sae_tui.app_parts.router import Router
from sae_tui.gpu.monitor import Monitor
from sae_tui.jobs.view.watcher import Watcher
from sae_tui.notices import Notices, tell_alert, tell_end, tell_news
from sae_tui.palette import Commands, JobCommands, Palette, commands
from sae_tui.screens.dashboard import Dashboard
from sae_tui.session import Session
from sae_tui.settings import Settings
from sae_tui.terminal.driver import TerminalDriver, has_shell
from sae_tui.terminal.key_order import KeysInOrder
from sae_tui.terminal.painter import Painter, Printable
from sae_tui.terminal.plain import Colourless, Plain
from sae_tui.widgets.reading import LinesScreen
from trainer.contract.errors import Problem
from trainer.contract.exits import Exit
from trainer.contract.paths import DataDir

if TYPE_CHECKING:
    from sae_tui.hosts.hosts import Hosts

_LEAVE_S = 5.0


class OwnThreads(ThreadPoolExecutor):
    """Runs every call in a new daemon thread, so that a hung call never delays another.

    asyncio's default executor has only min(32, cores + 4) threads, so a few hung reads would block all actions.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1)  # this executor's own workers are never used
        self._own: set[threading.Thread] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._own.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="worker", daemon=True)
        self._own.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the user's thread limit is reached
            self._own.discard(thread)
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait up to 5 s for running calls; a call that hangs longer does not keep the app from exiting."""
        deadline = time.monotonic() + _LEAVE_S
        for thread in tuple(self._own) if wait else ():
            thread.join(max(0.0, deadline - time.monotonic()))


class SaeApp(KeysInOrder, Notices):
    """Monitors GPUs and launches jobs. A job never depends on the app: it keeps running when the app quits."""

    CSS_PATH = "app.tcss"
    TITLE = "sae-tui"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS = {Commands, JobCommands}
    BINDINGS = [
        Binding("q", "quit", "Quit", id="app.quit", tooltip="Quit; jobs keep running"),
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Stop", show=False),
        Binding("question_mark", "help", "Help", key_display="?", id="app.help", tooltip="The keys of this screen"),
        Binding("ctrl+p", "command_palette", "Commands", show=False, priority=True, id="app.commands",
                tooltip="Find a command or a job by a few letters"),
        # In a text field, the question mark is typed as text, so the footer shows F1 instead.
        Binding("f1", "help", "Help", key_display="F1", show=False, id="app.help_in_text",
                tooltip="The keys of this screen"),
        Binding("exclamation_mark", "notices", "Messages", key_display="!", show=False, id="app.notices",
                tooltip="The app's latest messages, in full"),
        # Not ctrl+l, which launches the job on the launch form.
        Binding("ctrl+n", "redraw", "Refresh", show=False, priority=True, id="app.redraw",
                tooltip="Read GPUs and jobs now, and repaint the screen"),
        Binding("d", "doctor", "Doctor", show=False, id="doctor", tooltip="Check this machine for problems"),
        Binding("comma", "settings", "Settings", key_display=",", show=False, id="settings",
                tooltip="Theme, alerts, other hosts and all other settings"),
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
        *,
        readonly: bool = False,
        plain: Plain | None = None,
        colourless: bool = False,
        hosts: Hosts | None = None,
        make_hosts: MakeHosts | None = None,
        given: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        # An animated scroll sends a frame for each step, which takes too long over a slow connection.
        self.animation_level = "none"
        # The driver redirects the standard error of libraries to this file; None discards it.
        self.log_file = None if readonly else data.app_log
        # Textual's monochrome filter turns colours into greys. Without colours, the app must not send any colour codes.
        filters = [one for one in self._filters if not isinstance(one, Monochrome)]
        self._filters = [*filters, Printable(), *([plain] if plain else [])]
        self._filters += [Colourless()] if colourless or self.no_color else []
        watcher = Watcher(data, lambda: self.post_message(JobsChanged()), readonly=readonly)
        alerts = AlertWatcher(
            data,
            settings,
            lambda: None if monitor.opening else monitor.latest(),
            lambda: watcher.holders,
            lambda: self.post_message(AlertsChanged()),
            readonly=readonly,
        )
        self.session = Session(
            data, monitor, watcher, settings, alerts, self, readonly=readonly, hosts=hosts, given=given
        )
        dashboard = Dashboard(self.session, settings.monitor_view_default)
        # `Refresh` sets the theme, making Textual reread all styles, so it is created before any style is read.
        self.redraw = Refresh(self, self.session, dashboard, make_hosts)
        self.session.go = self.router = Router(self, self.session, dashboard, self.redraw)
        self._painter = Painter()
        self._settings_problems = tuple(problems)
        self._first_words = first_words
        self._n_reported = self._n_alerts = self._n_alert_problems = 0

    def get_driver_class(self) -> type[Driver]:
        driver = super().get_driver_class()
        return TerminalDriver if issubclass(TerminalDriver, driver) else driver

    def panic(self, *renderables: RenderableType) -> None:
        """Print the error and exit with code 1. Textual 8.2 does not set this code for some errors."""
        self._return_code = Exit.FAILED
        super().panic(*renderables)

    def _handle_exception(self, error: Exception) -> None:
        """Ignore missing widgets while the app is quitting, because Textual 8.2 no longer mounts widgets then."""
        if not (self._exit and isinstance(error, NoMatches)):
            super()._handle_exception(error)

    def on_mount(self) -> None:
        asyncio.get_running_loop().set_default_executor(OwnThreads())
        self.session.monitor.start()
        self.session.watcher.start()
        self.session.alerts.start()
        if self.session.hosts:
            self.session.hosts.start(lambda: self.post_message(JobsChanged()))
        self.router.start()
        self.redraw.start()
        if self._first_words:
            self.notify(self._first_words, markup=False)
        for problem in self._settings_problems:
            self.notify(str(problem), title="Settings", severity="error", markup=False)

    def on_unmount(self) -> None:
        self.session.model.close()
        self.session.alerts.stop()
        if self.session.hosts:
            self.session.hosts.stop()
        self.session.watcher.stop()
        self.session.monitor.stop()

    def pause_reading(self) -> None:
        """Close the GPU driver and the connections to other hosts before the process is suspended."""
        self.session.monitor.pause()
        if self.session.hosts:
            self.session.hosts.cut()

    def resume_reading(self) -> None:
        """Resume reading the GPUs. The connections to other hosts are re-established automatically."""
        self.session.monitor.resume()

    @on(JobsChanged)
    def _jobs_changed(self) -> None:
        for job in self.session.actions.newly_ended():
            tell_end(self, job, self.session.settings.notify)
        news = self.session.watcher.news
        for one in news[self._n_reported :]:
            tell_news(self, one, self.session.settings.notify)
        self._n_reported = len(news)
        self.redraw.show_jobs()

    @on(AlertsChanged)
    def _alerts_changed(self) -> None:
        alerts = self.session.alerts
        changed, problems = alerts.changed, alerts.problems
        for alert in changed[self._n_alerts :]:
            tell_alert(self, alert, self.session.settings.notify)
        for problem in problems[self._n_alert_problems :]:
            self.notify(problem, severity="warning", markup=False)
        self._n_alerts, self._n_alert_problems = len(changed), len(problems)
        self.redraw.show_gpus()

    def _display(self, screen: Screen[object], renderable: RenderableType | None) -> None:
        super()._display(screen, self._painter.lighten(screen, renderable))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        return commands(screen, self.router, self.redraw.choose_theme)

    def export_screenshot(self, **options: Any) -> str:
        """Draw the screen as SVG. First hide environment variable values, because users share screenshots."""
        for screen in self.screen_stack:  # a dialog shows the screen below it
            if isinstance(screen, LinesScreen):
                screen.hide_values()
        return super().export_screenshot(**options)

    def action_new_job(self, kind: str = "") -> None:
        self.router.new_job(kind)

    def action_show_dashboard(self) -> None:
        self.router.show_dashboard()

    def action_settings(self) -> None:
        self.router.show_settings()

    def action_doctor(self) -> None:
        self.router.show_doctor()

    def action_help(self) -> None:
        self.router.show_help()

    def action_command_palette(self) -> None:
        Palette.open(self)

    def action_redraw(self) -> None:
        """Read GPUs and jobs now, and repaint every cell, for example after another program wrote to the terminal."""
        self.redraw.read_now()
        self._painter.forget()
        self.refresh(layout=True)

    def action_suspend_process(self) -> None:
        """Suspend the app until the user enters `fg`, if it runs in a shell that can resume it."""
        if self._driver and self._driver.can_suspend and has_shell():
            # Suspend the process group, as the terminal does, because the shell may be waiting for a wrapper such as
            # `uv run`.
            os.killpg(os.getpgrp(), signal.SIGTSTP)
        else:
            self.notify("Not suspended: no shell here could resume the app.")

    def action_undo_delete(self) -> None:
        self.session.actions.undo_delete()

    def action_help_quit(self) -> None:
        """Show which key quits, since ctrl+c does not: ctrl+q if `q` would be typed as text, otherwise q."""
        types = isinstance(self.focused, (Input, TextArea)) or self.screen.is_modal
        self.notify(f"Press {'ctrl+q' if types else 'q'} to quit; jobs keep running.")
