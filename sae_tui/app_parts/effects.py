"""Applies changed settings to the running app."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from textual.app import App

from sae_tui.app_parts.colours import Colours
from sae_tui.app_parts.redraw import JobsChanged, Redraw
from sae_tui.gpu.upkeep import Retention
from sae_tui.screens.dashboard import Dashboard
from sae_tui.session import Session
from sae_tui.settings import Settings, load_settings
from trainer.contract.errors import Problem

if TYPE_CHECKING:
    from sae_tui.hosts.hosts import Hosts

# Build the other hosts from the settings and the flags; also return the problems with host names in the settings.
MakeHosts = Callable[[Settings], tuple["Hosts | None", list[Problem]]]


class Effects:
    """Passes changed settings to the objects that were created from them at startup.

    All other code reads `session.settings` when it needs them. Settings in `settings.AT_START` only take effect at the
    next start.
    """

    def __init__(
        self,
        app: App[None],
        session: Session,
        dashboard: Dashboard,
        colours: Colours,
        redraw: Redraw,
        make_hosts: MakeHosts | None,
    ) -> None:
        self._app, self._session, self._dashboard = app, session, dashboard
        self._colours, self._redraw, self._make_hosts = colours, redraw, make_hosts

    def read_anew(self) -> None:
        """Read the settings file and apply the changes."""
        new, problems = load_settings(self._session.data.settings_file)
        problems += self._take(new)
        for problem in problems:
            self._app.notify(str(problem), title="Settings", severity="error", markup=False)

    def _take(self, new: Settings) -> list[Problem]:
        """Apply the settings; return the problems that only show up when they are applied."""
        session, old = self._session, self._session.settings
        session.settings = new
        session.alerts.change(new)
        session.monitor.change(new.sampling_interval_s, Retention(new.history_hours, new.history_days))
        if new.sampling_interval_s != old.sampling_interval_s:
            self._redraw.pace()
        if new.theme != old.theme:
            self._colours.show()
        if new.monitor_view_default != old.monitor_view_default:
            self._dashboard.choose_view(new.monitor_view_default)
        problems = self._change_hosts(new) if (new.hosts, new.ssh_command) != (old.hosts, old.ssh_command) else []
        self._redraw.show_jobs()
        self._redraw.show_gpus()
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
