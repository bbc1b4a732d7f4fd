"""Opens and closes screens above the dashboard.

Other screens are imported when first opened, because importing all of them took a tenth of the startup time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from textual.app import App
from textual.screen import Screen

from sae_tui.app_parts.refresh import Refresh
from sae_tui.jobs.launch.clone import clone_settings, free_name
from sae_tui.jobs.view.postmortem import remedy_of
from sae_tui.screens.dashboard import Dashboard
from sae_tui.session import Session
from sae_tui.widgets.confirm import Confirm
from trainer.contract.errors import UserError
from trainer.contract.planning.check_job import proposal_class
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job import JobConfig
from trainer.contract.wording import plural

if TYPE_CHECKING:
    from sae_tui.doctor.base import Finding
    from sae_tui.screens.launch import LaunchScreen


class Router:
    """Opens screens for the session, and keeps the launch form until its job is launched or the form is replaced."""

    def __init__(self, app: App[None], session: Session, dashboard: Dashboard, refresh: Refresh) -> None:
        self._app = app
        self._session = session
        self._refresh = refresh
        self._settings_draft: dict[str, str] = {}
        # The launch form, kept while other screens are shown, and the Python setting from when the form was filled in.
        self._kept: LaunchScreen | None = None
        self._python = session.settings.python
        self.dashboard = dashboard

    def start(self) -> None:
        """Show the dashboard as the first screen."""
        self._app.push_screen(self.dashboard)

    def show_dashboard(self) -> None:
        """Go back to the dashboard and stop following a job."""
        self._session.watcher.follow(None)
        while self._app.screen is not self.dashboard:
            self._app.pop_screen()

    def switch_to(self, screen: Screen[None]) -> None:
        """Show a screen above the dashboard, and close all others."""
        self.show_dashboard()
        self._app.push_screen(screen)

    def open_job(self, job_id: int) -> None:
        """Show a job and follow it, starting with rank 0."""
        from sae_tui.screens.job import JobScreen

        self.switch_to(JobScreen(self._session, job_id))
        self._session.watcher.follow(job_id, 0)

    # the launch form

    def new_job(self) -> None:
        """Open the kept launch form, or a new one for a training job."""
        if not self._session.actions.refused():
            self._open_form(JobConfig.kind)

    def new_extraction(self) -> None:
        """Open the kept launch form for an extraction job, or a new one; ask first if another draft would be lost."""
        if not self._session.actions.refused():
            self._open_form(ExtractJob.kind)

    def _open_form(self, kind: str) -> None:
        from sae_tui.jobs.launch.job_form import extraction_preset
        from sae_tui.jobs.launch.kept_draft import kept
        from sae_tui.screens.launch import LaunchScreen

        session = self._session
        form = self._kept.form if self._kept else None
        # A form without changes is outdated if the settings now name another Python.
        is_as_wanted = form and form.kind == kind and self._python == session.settings.python
        if self._kept and form and (is_as_wanted or (form.changed and kind in (JobConfig.kind, form.kind))):
            self.switch_to(self._kept)
            form.tell_draft()
        elif form is None and (draft := kept(session.data, kind)):  # a draft saved when the app exited
            self._keep(screen := LaunchScreen(session, preset=draft))
            self._app.call_later(screen.form.tell_draft)
        else:
            # `_replace_form` asks only if `kind` is an extraction. For "New job", the first branch shows any changed
            # draft.
            new = LaunchScreen(session, preset=extraction_preset() if kind == ExtractJob.kind else None)
            self._replace_form("an extraction form", new)

    def clone_job(self, job_id: int) -> None:
        """Open the launch form with a job's settings; halve the batch size if the job ran out of GPU memory."""
        session = self._session
        job = None if session.actions.refused() else session.actions.job(job_id)
        if job is None:
            return
        from sae_tui.screens.launch import LaunchScreen
        from sae_tui.screens.launch_form import ClonedJob

        try:
            was, cure = clone_settings(session.data, job_id), remedy_of(job)
            is_too_large = cure is not None and cure.kind == "gpu-memory"
            overrides = proposal_class(was).half_batch(was, job.world_size) if is_too_large else []
            config = clone_settings(session.data, job_id, overrides)
        except UserError as error:
            self._app.notify(str(error), title="Not cloned", severity="error", markup=False)
            return
        name = free_name(config.name, (one.name for one in session.jobs))
        origin = ClonedJob(job_id, was, msgspec.structs.replace(config, name=name))
        self._replace_form("the clone", LaunchScreen(session, origin))

    def _replace_form(self, what: str, new: LaunchScreen) -> None:
        """Open a new launch form; ask first if changes in the kept form would be lost."""
        if self._kept and (changed := self._kept.form.changed):
            question = f"A draft with {plural(len(changed), 'changed setting')} is kept. Replace it with {what}?"
            self._app.push_screen(Confirm(question, yes="Replace"), lambda yes: self._keep(new) if yes else None)
        else:
            self._keep(new)

    def _keep(self, new: LaunchScreen) -> None:
        """Show a new launch form.

        The form is installed as an app screen so that it keeps its content while other screens are shown.
        """
        self.show_dashboard()
        self._forget_form()
        self._kept, self._python = new, self._session.settings.python
        self._app.install_screen(new, "launch")
        self._app.push_screen(new)

    def _forget_form(self) -> None:
        """Discard the launch form unless it is open, so that the next job starts from a new form."""
        if self._kept and self._kept not in self._app.screen_stack:
            self._app.uninstall_screen(self._kept)
            self._kept.remove()
            self._kept = None

    def after_launch(self, job_id: int | None) -> None:
        """Select the new job and discard its form; if there is no new job, return to the form."""
        if job_id is None:
            self.new_job()
        else:
            self._forget_form()
            self.dashboard.select(job_id)

    # other screens

    def show_doctor(self) -> None:
        """Show any problems that would prevent training on this machine."""
        from sae_tui.screens.doctor import DoctorScreen

        # Probes run computations on the GPUs, so read-only mode skips them.
        refused = self._session.actions.refused
        self.switch_to(DoctorScreen(self._run_checks, lambda: self._run_checks(probe=not refused())))

    def _run_checks(self, *, probe: bool = False) -> Iterable[Finding]:
        """Run the checks on a separate GPU source because the monitor's source is in use."""
        from sae_tui.doctor.base import CheckedMachine
        from sae_tui.doctor.examine import CHECKS, PROBES, examine
        from sae_tui.jobs.gpus.occupancy import Occupancy, gpu_source

        monitor, data = self._session.monitor, self._session.data
        source = gpu_source(monitor.source_name, Occupancy(data), count=len(monitor.latest()) or None)
        return examine(
            CheckedMachine(data, source, python=self._session.settings.python), (*CHECKS, *PROBES) if probe else CHECKS
        )

    def show_help(self) -> None:
        """Show the current screen's keys in a help screen above it."""
        from sae_tui.screens.help import HelpScreen

        self._app.push_screen(HelpScreen(self._app.screen))

    def show_settings(self) -> None:
        """Show the settings form above the current screen, including unsaved changes."""
        from sae_tui.screens.settings_form import SettingsScreen

        if not any(isinstance(screen, SettingsScreen) for screen in self._app.screen_stack):
            self._app.push_screen(SettingsScreen(self._session, self._settings_draft, self._refresh.read_settings))

    def show_alerts(self) -> None:
        """Show the active alerts and the alerts from the last day, above the current screen."""
        from sae_tui.panels.alerts import alert_lines
        from sae_tui.widgets.reading import TextScreen

        recent = self._session.alerts.recent()
        self._app.push_screen(TextScreen("Alerts", partial(alert_lines, recent)))

    def show_own_cost(self) -> None:
        """Show the app's own resource use above the current screen."""
        from sae_tui.own_cost import cost_lines, own_cost
        from sae_tui.widgets.reading import TextScreen

        written = getattr(self._app._driver, "n_written", 0)
        cost = own_cost(written, self._session.monitor.readings_s())
        self._app.push_screen(TextScreen("Resource use of this app", partial(cost_lines, cost)))
