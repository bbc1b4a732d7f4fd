"""The draft in the launch form: it is kept until the job is launched or the form of another job replaces it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from textual.app import App
from textual.worker import get_current_worker

from sae_tui.jobs.launch import kept_draft
from sae_tui.jobs.launch.clone import clone_settings, free_name
from sae_tui.jobs.launch.job_form import extraction_preset
from sae_tui.screens.launch import LaunchScreen
from sae_tui.screens.launch_form import ClonedJob, LaunchForm
from sae_tui.session import Session
from sae_tui.widgets.confirm import Confirm
from trainer.contract.errors import UserError, sentence
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import AnyJob
from trainer.contract.wording import plural

_LAUNCH = "launch"  # installed, so that a half-filled form survives a visit to the dashboard


class Drafts:
    """Opens the launch form and launches its jobs; `on_launched` is called with the id of the last job."""

    def __init__(self, app: App[None], session: Session, on_launched: Callable[[int], object]) -> None:
        self._app = app
        self._session = session
        self._on_launched = on_launched
        # The Python in the settings when the form was filled.
        self._python = session.settings.python

    def open(self) -> None:
        """Open the form as it was left, or a new one for a training."""
        kept = self._kept
        if kept and (kept.changed or not (kept.is_extraction or self._is_outdated)):
            self._open_kept(kept)
        elif kept or not self._open_left(JobConfig.kind):
            self._open(LaunchScreen(self._session))

    def open_extraction(self) -> None:
        """Open the extraction form as it was left, or a new one; ask before another draft is lost."""
        kept = self._kept
        if kept and kept.is_extraction and (kept.changed or not self._is_outdated):
            self._open_kept(kept)
        elif kept or not self._open_left(ExtractJob.kind):
            self._replace_by("an extraction form", LaunchScreen(self._session, preset=extraction_preset()))

    def _open_left(self, kind: str) -> bool:
        """Open the draft of this kind of job that was saved when the app ended; return False if none was saved."""
        left = kept_draft.kept(self._session.data, kind)
        if left is not None:
            self._open(screen := LaunchScreen(self._session, preset=left))
            self._app.call_later(screen.form.tell_draft)
        return left is not None

    @property
    def _is_outdated(self) -> bool:
        """True if an unchanged form names another Python than the settings do now."""
        return self._python != self._session.settings.python

    def _open_kept(self, kept: LaunchForm) -> None:
        self._session.go.switch_to(_LAUNCH)
        kept.tell_draft()

    def _replace_by(self, what: str, form: LaunchScreen) -> None:
        """Open a form; ask first if changes in another form would be lost."""
        if kept := self._kept and self._kept.changed:
            question = f"A draft with {plural(len(kept), 'changed setting')} is kept. Replace it with {what}?"
            self._app.push_screen(Confirm(question, yes="Replace"), lambda yes: self._open(form) if yes else None)
        else:
            self._open(form)

    def clone(self, job_id: int) -> None:
        """Open the form with a job's settings; halve the batch size if the job ran out of GPU memory."""
        actions, data = self._session.actions, self._session.data
        job = actions.job(job_id)
        if job is None:
            return
        try:
            was = clone_settings(data, job_id)
            config = clone_settings(data, job_id, actions.half_batch(job, was))
        except UserError as error:
            self._app.notify(str(error), title="Not cloned", severity="error", markup=False)
            return
        name = free_name(config.name, (one.name for one in self._session.jobs))
        config = msgspec.structs.replace(config, name=name)
        self._replace_by("the clone", LaunchScreen(self._session, ClonedJob(job_id, was, config)))

    def launch(self, jobs: Sequence[AnyJob], parent: int | None) -> None:
        """Launch checked jobs in the background, and go back to the dashboard."""
        self._session.go.show_dashboard()
        act = partial(self._launch, tuple(jobs), parent)
        self._app.run_worker(act, thread=True, group="actions", exit_on_error=False)

    def _launch(self, jobs: tuple[AnyJob, ...], parent: int | None) -> None:
        try:
            job_ids = self._session.actions.launch(jobs, parent)
        except (UserError, OSError) as error:
            self._app.call_later(self._refuse, sentence(error))
        except Exception as error:
            self._app.call_later(self._refuse, f"the launch failed because of a bug in sae-tui: {error!r}")
        else:
            kept_draft.drop(self._session.data, jobs[0].kind)
            self._app.call_later(self._end, job_ids)

    def _refuse(self, why: str) -> None:
        self.open()
        self._app.notify(why, title="Not launched", severity="error", markup=False)
        self._session.watcher.poke()

    def _end(self, job_ids: Sequence[int]) -> None:
        self._forget()
        self._on_launched(job_ids[-1])
        self._session.watcher.poke()
        self._session.actions.do(partial(self._tell_launched, job_ids))

    def _tell_launched(self, job_ids: Sequence[int]) -> str:
        """Return the outcome of the launch once it is known; "" if a job was deleted meanwhile."""
        worker = get_current_worker()
        try:
            return self._session.actions.tell_launched(job_ids, lambda: worker.is_cancelled)
        except UserError:
            return ""

    @property
    def _kept(self) -> LaunchForm | None:
        """The form that was left open, if there is one."""
        is_kept = self._app.is_screen_installed(_LAUNCH)
        return self._app.get_screen(_LAUNCH, LaunchScreen).form if is_kept else None

    def _open(self, form: LaunchScreen) -> None:
        self._python = self._session.settings.python
        self._session.go.show_dashboard()
        self._forget()
        self._app.install_screen(form, _LAUNCH)
        self._session.go.switch_to(_LAUNCH)

    def _forget(self) -> None:
        """Discard the form unless a screen shows it, so that the next job starts from a new form."""
        app = self._app
        if app.is_screen_installed(_LAUNCH) and (filled := app.get_screen(_LAUNCH)) not in app.screen_stack:
            app.uninstall_screen(_LAUNCH)
            filled.remove()
