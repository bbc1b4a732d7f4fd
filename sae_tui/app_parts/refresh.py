"""Redraws the visible screens when there are new GPU samples, job changes or settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from textual.app import App
from textual.css.query import NoMatches
from textual.message import Message
from textual.screen import Screen

from sae_tui.gpu import faults
from sae_tui.gpu.upkeep import Retention
from sae_tui.screens.dashboard import Dashboard
from sae_tui.session import Session
from sae_tui.settings import Settings, load_settings
from sae_tui.theme import OWN_THEMES, ThemeName, shown_theme
from trainer.contract.errors import Problem

if TYPE_CHECKING:
    from sae_tui.hosts.hosts import Hosts

_LOOK_S = 0.03
_MOST_LOOKS = 60
_ANSWERED_S = 0.2  # a read takes up to 0.1 s on eight GPUs; slower GPUs are drawn at the next tick

# Creates the connections to other hosts from settings and flags; also returns problems with host names in the settings.
MakeHosts = Callable[[Settings], tuple["Hosts | None", list[Problem]]]


class JobsChanged(Message, bubble=False):
    """The job store has changed. The message carries no data; screens read it from the watcher."""

    def can_replace(self, message: Message) -> bool:
        """Replace an older message in the queue, so that a backlog causes only one repaint."""
        return type(message) is type(self)


class AlertsChanged(Message, bubble=False):
    """An alert was raised or cleared. The message carries no data."""


class Refresh:
    """Redraws what has changed on every visible screen, and applies the theme from the settings."""

    def __init__(self, app: App[None], session: Session, dashboard: Dashboard, make_hosts: MakeHosts | None) -> None:
        self._app, self._session = app, session
        self._dashboard, self._make_hosts = dashboard, make_hosts
        self._job_of_gpu: dict[str, int] = {}
        for theme in OWN_THEMES:
            app.register_theme(theme)
        self._show_theme()

    def start(self) -> None:
        """Draw the GPUs at every sampling interval, and once as soon as the first samples arrive."""
        self._ticks = self._app.set_interval(self._session.settings.sampling_interval_s, self.show_gpus)
        self._first_look = self._app.set_interval(_LOOK_S, self._look_first, repeat=_MOST_LOOKS)

    def _look_first(self) -> None:
        monitor = self._session.monitor
        samples = monitor.latest()
        answered = samples and all(sample.reason != faults.NO_ANSWER_YET for sample in samples)
        if answered or monitor.problem:
            self._first_look.stop()
            self.show_gpus()

    # what has changed

    def show_gpus(self) -> None:
        """Draw the latest samples."""
        self._draw("show_gpus")

    def show_jobs(self) -> None:
        """Draw the latest jobs and the keys that apply to them."""
        self._draw("show_jobs")
        job_of_gpu = {uuid: job.id for uuid, job in self._session.watcher.holders.jobs.items()}
        if job_of_gpu != self._job_of_gpu:
            # Show the job on its GPU immediately instead of at the next sample.
            self._job_of_gpu = job_of_gpu
            self._draw("show_gpus")
        self._draw("refresh_bindings")

    def read_now(self) -> None:
        """Read the GPUs and jobs at once, and draw them as soon as the GPUs have had time to answer.

        A screen that shows other data rereads it in its `read_again` method.
        """
        self._session.monitor.read_now()
        self._session.watcher.poke()
        self._draw("read_again")
        self.show_gpus()
        self._app.set_timer(_ANSWERED_S, self.show_gpus)

    def _draw(self, method: str) -> None:
        """Call `method` on every visible screen that defines it.

        The screen's widgets may be gone while the app is closing.
        """
        for screen in self._in_sight():
            if show := getattr(screen, method, None):
                with contextlib.suppress(NoMatches):
                    show()

    def _in_sight(self) -> Iterable[Screen[object]]:
        """Yield the top screen and, if it is a dialog, the screens visible behind it."""
        for screen in reversed(self._app.screen_stack):
            yield screen
            if not screen.is_modal:
                return

    # theme and settings

    def choose_theme(self, name: ThemeName) -> None:
        """Change the theme immediately and, unless in read-only mode, save it in the settings file."""
        self._session.actions.keep("Theme", theme=name)
        self._show_theme()

    def _show_theme(self) -> None:
        chosen = self._session.settings.theme
        self._app.set_class(chosen == "high-contrast", "-strong")
        self._app.theme = shown_theme(chosen, self._app.console.color_system)

    def read_settings(self) -> None:
        """Read the settings file and pass its changes to the objects created from the settings at startup.

        All other code reads `session.settings` whenever it needs a setting. Settings in `settings.AT_START` take effect
        only at the next start.
        """
        new, problems = load_settings(self._session.data.settings_file)
        for problem in [*problems, *self._apply(new)]:
            self._app.notify(str(problem), title="Settings", severity="error", markup=False)

    def _apply(self, new: Settings) -> list[Problem]:
        """Apply the settings, and return the problems found only while applying them."""
        session, old = self._session, self._session.settings
        session.settings = new
        session.alerts.change(new)
        session.monitor.change(new.sampling_interval_s, Retention(new.history_hours, new.history_days))
        if new.sampling_interval_s != old.sampling_interval_s:
            self._ticks.stop()
            self._ticks = self._app.set_interval(new.sampling_interval_s, self.show_gpus)
        if new.theme != old.theme:
            self._show_theme()
        if new.monitor_view_default != old.monitor_view_default:
            self._dashboard.choose_view(new.monitor_view_default)
        problems = self._change_hosts(new) if (new.hosts, new.ssh_command) != (old.hosts, old.ssh_command) else []
        self.show_jobs()
        self.show_gpus()
        return problems

    def _change_hosts(self, new: Settings) -> list[Problem]:
        if self._make_hosts is None:
            return []
        if self._session.hosts:
            self._session.hosts.stop()
        self._session.hosts, problems = self._make_hosts(new)
        if self._session.hosts:
            self._session.hosts.start(lambda: self._app.post_message(JobsChanged()))
        self._app.call_later(self._dashboard.change_hosts)
        return problems
