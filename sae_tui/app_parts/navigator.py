"""Changes which screen is shown, always directly above the dashboard.

Other screens are imported when they are first opened: importing all of them took a tenth of the app's startup time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from textual.app import App
from textual.screen import Screen

from sae_tui.screens.dashboard import Dashboard
from sae_tui.session import Session
from trainer.contract.settings.job_file import AnyJob

if TYPE_CHECKING:
    from sae_tui.app_parts.drafts import Drafts
    from sae_tui.app_parts.effects import Effects
    from sae_tui.doctor.base import Finding


class Navigator:
    """Opens the screens, each with the session."""

    effects: Effects  # set by the app after it has made everything that settings affect

    def __init__(self, app: App[None], session: Session) -> None:
        self._app = app
        self._session = session
        self._settings_draft: dict[str, str] = {}
        self.dashboard = Dashboard(session, session.settings.monitor_view_default)

    @functools.cached_property
    def _drafts(self) -> Drafts:
        from sae_tui.app_parts.drafts import Drafts

        return Drafts(self._app, self._session, self.dashboard.select)

    def start(self) -> None:
        """Show the dashboard as the first screen."""
        self._app.push_screen(self.dashboard)

    def show_dashboard(self) -> None:
        """Go back to the dashboard and stop following a job."""
        self._session.watcher.follow(None)
        while self._app.screen is not self.dashboard:
            self._app.pop_screen()

    def switch_to(self, screen: Screen[None] | str) -> None:
        """Show a screen above the dashboard, in place of any other."""
        self.show_dashboard()
        self._app.push_screen(screen)

    def open_job(self, job_id: int) -> None:
        """Show a job and follow it, starting with rank 0."""
        from sae_tui.screens.job import JobScreen

        self.switch_to(JobScreen(self._session, job_id))
        self._session.watcher.follow(job_id, 0)

    def new_job(self) -> None:
        """Open the launch form as it was left, or a new one."""
        if not self._session.actions.refused():
            self._drafts.open()

    def new_extraction(self) -> None:
        """Open the launch form of an extraction."""
        if not self._session.actions.refused():
            self._drafts.open_extraction()

    def clone_job(self, job_id: int) -> None:
        """Open the launch form with a job's settings."""
        if not self._session.actions.refused():
            self._drafts.clone(job_id)

    def launch(self, jobs: Sequence[AnyJob], parent: int | None = None) -> None:
        """Launch checked jobs in the background, and go back to the dashboard."""
        self._drafts.launch(jobs, parent)

    def show_doctor(self) -> None:
        """Show the problems that would prevent a training on this machine."""
        from sae_tui.screens.doctor import DoctorScreen

        # Probes run work on the GPUs, so read-only mode excludes them.
        refused = self._session.actions.refused
        self.switch_to(DoctorScreen(self._run_checks, lambda: self._run_checks(probe=not refused())))

    def _run_checks(self, *, probe: bool = False) -> Iterable[Finding]:
        """Run the checks on a separate GPU source, since the monitor's is in use."""
        from sae_tui.doctor.base import CheckedMachine
        from sae_tui.doctor.examine import CHECKS, PROBES, examine
        from sae_tui.jobs.gpus.occupancy import Occupancy, gpu_source

        monitor, data = self._session.monitor, self._session.data
        source = gpu_source(monitor.source_name, Occupancy(data), count=len(monitor.latest()) or None)
        return examine(
            CheckedMachine(data, source, python=self._session.settings.python), (*CHECKS, *PROBES) if probe else CHECKS
        )

    def show_help(self) -> None:
        """Show the keys of the current screen in a help screen above it."""
        from sae_tui.screens.help import HelpScreen

        self._app.push_screen(HelpScreen(self._app.screen))

    def show_settings(self) -> None:
        """Show the settings form above the current screen, with changes that are not saved yet."""
        from sae_tui.screens.settings_form import SettingsScreen

        if not any(isinstance(screen, SettingsScreen) for screen in self._app.screen_stack):
            self._app.push_screen(SettingsScreen(self._session, self._settings_draft))

    def read_settings(self) -> None:
        """Read the settings file and apply its changes."""
        self.effects.read_anew()

    def show_alerts(self) -> None:
        """Show the active alerts and the alerts of the last day, above the current screen."""
        from sae_tui.panels.alerts import alert_lines
        from sae_tui.widgets.reading import TextScreen

        recent = self._session.alerts.recent()
        self._app.push_screen(TextScreen("Alerts", functools.partial(alert_lines, recent)))

    def show_own_cost(self) -> None:
        """Show what the app itself costs, above the current screen."""
        from sae_tui.own_cost import cost_lines, own_cost
        from sae_tui.widgets.reading import TextScreen

        written = getattr(self._app._driver, "n_written", 0)
        cost = own_cost(written, self._session.monitor.readings_s())
        self._app.push_screen(TextScreen("Resource use of this app", functools.partial(cost_lines, cost)))
