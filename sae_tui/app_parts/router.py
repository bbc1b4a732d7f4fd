"""Opens and closes screens above the dashboard.

Other screens are imported when first opened, because importing all of them would take a tenth of the startup time.
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
from trainer.contract.settings.catalog import TRAINING
from trainer.contract.settings.job import AnyJob
from trainer.contract.wording import plural

if TYPE_CHECKING:
    from sae_tui.doctor.base import Finding
    from sae_tui.screens.launch import LaunchScreen


class Router:
    """Opens the session's screens; keeps a launch form per kind of job until it is replaced or its job is launched."""

    def __init__(self, app: App[None], session: Session, dashboard: Dashboard, refresh: Refresh) -> None:
        self._app = app
        self._session = session
        self._refresh = refresh
        self._settings_draft: dict[str, str] = {}
        # The launch forms, kept while other screens are shown; the most recently shown form is last.
        self._kept: list[LaunchScreen] = []
        self.dashboard = dashboard

    def start(self) -> None:
        """Show the dashboard as the first screen."""
        self._app.push_screen(self.dashboard)

    def show_dashboard(self) -> None:
        """Go back to the dashboard and stop following a job."""
        self._session.watcher.follow(None)
        self._back_to(self.dashboard)

    def _back_to(self, screen: Screen[None]) -> None:
        """Close all screens above this one."""
        while self._app.screen is not screen:
            self._app.pop_screen()

    def show(self, screen: Screen[None]) -> None:
        """Show a screen above the current one, to which `escape` returns."""
        self._app.push_screen(screen)

    def open_job(self, job_id: int) -> None:
        """Show a job, which follows it, starting with rank 0."""
        from sae_tui.screens.job import JobScreen

        if not (type(top := self._app.screen) is JobScreen and top.job_id == job_id):
            self.show(JobScreen(self._session, job_id))

    # the launch form

    def new_job(self, kind: str = "") -> None:
        """Open the kept launch form for a kind of job, or a new one; by default, the last form if it has changes."""
        if self._session.actions.refused():
            return
        if not kind:
            last = self._kept[-1].form if self._kept else None
            kind = last.kind if last and last.changed else TRAINING
        self._open_form(kind)

    def _open_form(self, kind: str) -> None:
        from sae_tui.jobs.launch.kept_draft import kept
        from sae_tui.screens.launch import LaunchScreen

        session, screen = self._session, self._kept_form(kind)
        # A form without changes is outdated if the settings now name another Python.
        if screen and (screen.form.changed or screen.form.python == session.settings.python):
            self._show_form(screen)
            screen.form.tell_draft()
            return
        draft = None if screen else kept(session.data, kind)  # a draft saved when the app exited
        self._keep(new := LaunchScreen(session, kind, preset=draft))
        if draft:
            self._app.call_later(new.form.tell_draft)

    def _kept_form(self, kind: str) -> LaunchScreen | None:
        return next((screen for screen in reversed(self._kept) if screen.form.kind == kind), None)

    def clone_job(self, job_id: int) -> None:
        """Open the launch form with a job's settings; halve the batch size if the job ran out of GPU memory."""
        session = self._session
        job = None if session.actions.refused() else session.actions.job(job_id)
        if job is None:
            return
        try:
            was, cure = clone_settings(session.data, job_id), remedy_of(job)
            is_too_large = cure is not None and cure.kind == "gpu-memory"
            overrides = proposal_class(was).half_batch(was, job.world_size) if is_too_large else []
            config = clone_settings(session.data, job_id, overrides)
        except UserError as error:
            self._app.notify(str(error), title="Not cloned", severity="error", markup=False)
            return
        name = free_name(config.name, (one.name for one in session.jobs))
        self.open_clone(job_id, was, msgspec.structs.replace(config, name=name))

    def open_clone(self, job_id: int, was: AnyJob, start: AnyJob, host: str = "") -> None:
        """Open the launch form with a clone's settings, `start`; `host` is the job's host if it is not this one."""
        from sae_tui.screens.launch import LaunchScreen
        from sae_tui.screens.launch_form import ClonedJob

        origin = ClonedJob(job_id, was, start, host)
        self._replace_form("the clone", LaunchScreen(self._session, start.kind, origin))

    def _replace_form(self, what: str, new: LaunchScreen) -> None:
        """Open a new launch form; ask first if changes in the kept form for its kind of job would be lost."""
        if (old := self._kept_form(new.form.kind)) and (changed := old.form.changed):
            question = f"A draft with {plural(len(changed), 'changed setting')} is kept. Replace it with {what}?"
            self._app.push_screen(Confirm(question, yes="Replace"), lambda yes: self._keep(new) if yes else None)
        else:
            self._keep(new)

    def _keep(self, new: LaunchScreen) -> None:
        """Show a new launch form in place of the kept one for its kind of job.

        The form is installed as an app screen so that it keeps its content while other screens are shown.
        """
        self._leave_forms()
        if old := self._kept_form(new.form.kind):
            self._forget_form(old)
        self._app.install_screen(new, f"launch-{id(new)}")
        self._kept.append(new)
        self.show(new)

    def _show_form(self, screen: LaunchScreen) -> None:
        self._kept.remove(screen)
        self._kept.append(screen)
        self._leave_forms()
        self.show(screen)

    def _leave_forms(self) -> None:
        """If a launch form is open, close it and the screens above it, because a screen cannot be open twice."""
        while any(form in self._app.screen_stack for form in self._kept):
            self._app.pop_screen()

    def _forget_form(self, screen: LaunchScreen) -> None:
        """Discard a launch form unless it is open, so that the next job starts from a new form."""
        if screen not in self._app.screen_stack:
            self._kept.remove(screen)
            self._app.uninstall_screen(screen)
            screen.remove()

    def after_launch(self, job_id: int | None) -> None:
        """Select the new job and discard its form, the last one; if there is no new job, go back to the form."""
        if job_id is None:
            self._show_form(self._kept[-1])
        else:
            if self._kept:
                self._forget_form(self._kept[-1])
            self.dashboard.select(job_id)

    # other screens

    def show_doctor(self) -> None:
        """Show any problems that would prevent training on this machine."""
        from sae_tui.screens.doctor import DoctorScreen

        # Probes run computations on the GPUs, so read-only mode skips them.
        refused = self._session.actions.refused
        if not isinstance(self._app.screen, DoctorScreen):
            self.show(DoctorScreen(self._run_checks, lambda: self._run_checks(probe=not refused())))

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
        from sae_tui.widgets.reading import LinesScreen

        recent = self._session.alerts.recent()
        self._app.push_screen(LinesScreen("Alerts", partial(alert_lines, recent)))

    def show_own_cost(self) -> None:
        """Show the app's own resource use above the current screen."""
        from sae_tui.own_cost import cost_lines, own_cost
        from sae_tui.widgets.reading import LinesScreen

        written = getattr(self._app._driver, "n_written", 0)
        cost = own_cost(written, self._session.monitor.readings_s())
        self._app.push_screen(LinesScreen("Resource use of this app", partial(cost_lines, cost)))
