"""The screen for one job on another host, drawn from a local copy of the job's files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from textual import on, work
from textual.app import App, ComposeResult
from textual.message import Message
from textual.widgets import Label

from sae_tui.compare.runs import CopiedRun
from sae_tui.hosts.hosts import Hosts
from sae_tui.hosts.job_copy import JobCopy
from sae_tui.jobs.launch.clone import clone_settings, free_name
from sae_tui.jobs.launch.job_form import question_about
from sae_tui.jobs.view.program_use import ProgramUse
from sae_tui.jobs.view.reader import JobView
from sae_tui.jobs.view.watcher import JobDetail, Watcher
from sae_tui.panels.far_jobs import there
from sae_tui.screens.card import CardScreen
from sae_tui.screens.compare import MOST_RUNS, CompareScreen
from sae_tui.screens.far_actions import FarActions, view_of
from sae_tui.screens.far_log import FarLogScreen
from sae_tui.screens.features import FeaturesScreen
from sae_tui.screens.job import JobScreen
from sae_tui.session import Session
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.footer import FooterOffer
from trainer.contract.errors import UserError, sentence
from trainer.contract.settings.consent import code_in
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import to_table
from trainer.contract.wording import gibibytes


class CopyWatcher(Watcher):
    """Watches a copy of a job from another host. Its state belongs to that host, so it is never corrected here."""

    def _reconcile(self) -> str:
        return ""


class FarSession(Session):
    """This machine's session, but with the copy of one job from another host as its only job."""

    def __init__(self, home: Session, copy: JobCopy, watcher: CopyWatcher, actions: FarActions) -> None:
        self.home, self.data, self.watcher, self.actions = home, copy.data, watcher, actions
        self.place = f" on {copy.host}"

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of this machine's session, such as the monitor or the current settings."""
        return getattr(self.home, name)

    @property
    def detail(self) -> JobDetail | None:
        """The details of the copied job. The copy has no checkpoints, so the step at which a job resumes is unknown."""
        detail = self.watcher.detail
        if detail is None or detail.postmortem is None or not detail.postmortem.resumes:
            return detail
        cause = msgspec.structs.replace(detail.postmortem, resumes=f"resumes job {detail.view.id}{self.place}")
        return msgspec.structs.replace(detail, postmortem=cause)


class FarCardScreen(CardScreen):
    """Shows the report card of a job from another host; its features are copied when they are opened."""

    def __init__(self, session: Session, job_id: int, member: str, open_features: Callable[[str], object]) -> None:
        super().__init__(session, job_id, member)
        self._open_features = open_features

    def action_open_features(self) -> None:
        self._open_features(self.member)


class FarJobScreen(JobScreen):
    """Shows a job from another host with the screens for local jobs."""

    DEFAULT_CSS = """
    FarJobScreen > #far-line { width: 100%; height: 1; background: $panel; text-wrap: nowrap; }
    FarJobScreen > #far-line.-old { color: $text-warning; }
    """

    class Changed(Message):
        """The state of the copy has changed."""

    session: FarSession

    def __init__(self, app: App[None], home: Session, copy: JobCopy, marked: Sequence[int], then: str) -> None:
        """Prepare the screen; `marked` are the local jobs to compare with, and `then` is the first action."""
        self._copy, self._marked, self._then = copy, marked, then
        # Whether the user opened this screen only for its first action, and whether that action is done.
        self._only_for_first, self._is_first_done = bool(then), False
        watcher = CopyWatcher(copy.data, copy.on_change, readonly=True)
        self._actions = FarActions(home, copy.host, app)
        super().__init__(FarSession(home, copy, watcher, self._actions), copy.job_id)
        self._progress = self._reported = ""
        self._use = ProgramUse()  # a command's processes are on the other host

    def compose(self) -> ComposeResult:
        yield Label("", id="far-line", markup=False)
        yield from super().compose()

    def on_mount(self) -> None:
        self._copy.on_change = lambda: self.post_message(self.Changed())
        self._copy.start()
        self.session.watcher.start()

    def on_screen_resume(self) -> None:
        self._leave()

    async def _do_first(self, action: str) -> None:
        await self.run_action(action)
        self._is_first_done = self._only_for_first
        self._leave()

    def _leave(self) -> None:
        """Close this screen if it was opened only for an action whose screen is closed or could not open."""
        if self._is_first_done and not self._progress and self.app.screen is self:
            self.app.pop_screen()

    def on_unmount(self) -> None:
        self.session.watcher.stop()
        # Deleting a large file can take a long time on a slow disk.
        threading.Thread(target=self._copy.close, daemon=True).start()

    @on(Changed)
    def _show_change(self) -> None:
        self.session.watcher.poke()
        why = self._copy.state.sentence
        if why and why != self._reported and self.app.screen is not self:
            self.notify(self._words, severity="warning", markup=False)
        self._reported = why
        self.show_jobs()
        self._leave()

    def show_jobs(self) -> None:
        """Draw the copy and, above it, whether it is up to date."""
        if not self.is_mounted:
            return
        state = self._copy.state
        line = self.query_one("#far-line", Label)
        line.set_class(bool(state.sentence), "-old")
        line.update(f" {self._words}")
        super().show_jobs()
        if self._then and state.is_complete and self.session.detail:
            then, self._then = self._then, ""
            self.call_later(self._do_first, then)

    @property
    def _words(self) -> str:
        """The host, and whether the copy is up to date."""
        host, state = self._copy.host, self._copy.state
        if state.sentence:
            since = time.strftime("%H:%M:%S", time.localtime(state.since))
            return f"{host} {state.sentence}" + (f" · shown as of {since}" if state.is_complete else "")
        return f"{host} · {self._progress or ('connected' if state.is_complete else f'reading job {self.job_id} …')}"

    def keys_offered(self) -> FooterOffer:
        """Return the keys to show; keys that only name a command for the other host still work, but are not shown."""
        offer = super().keys_offered()
        hidden = offer.hidden | {"job.evaluate", "job.export", "job.load"}
        hidden = hidden - {"job.features"} if self._copy.state.features else hidden
        return FooterOffer(offer.first, hidden, offer.words)

    def _read_use(self) -> None:
        """Read nothing, because a command's processes and GPUs are on the other host."""

    @property
    def _job(self) -> JobView | None:
        """The job as last listed by its host or, if it is not listed, as copied."""
        view = view_of(self.session.home, self._copy.host)
        detail = self.session.detail
        return (view and view.job(self.job_id)) or (detail.view if detail else None)

    def _act(self, verb: str) -> None:
        if job := self._job:
            self._actions.act(verb, job)

    def _refuse(self, command: str) -> None:
        self.notify(there(self._copy.host, self.job_id, command), severity="warning", markup=False)

    def action_stop_job(self) -> None:
        self._act("stop")

    def action_pause_job(self) -> None:
        self._act("pause")

    def action_continue_job(self) -> None:
        self._act("continue")

    def action_export(self) -> None:
        self._refuse("export ID --out DIR")

    def action_copy_snippet(self) -> None:
        detail = self.session.detail
        place = detail.view.output_path if detail else None
        where = f"in {place} on {self._copy.host}" if place else f"not written yet on {self._copy.host}"
        self.notify(f"The SAE of job {self.job_id} is {where}; load it there.", severity="warning", markup=False)

    def action_evaluate(self) -> None:
        self._refuse("eval ID")

    def _launch_line(self, view: JobView) -> str:
        """Return the command that launches the same job on the other host, where its data is."""
        program, verb, rest = super()._launch_line(view).split(" ", 2)
        return f"{program} {verb} --host {self._copy.host} {rest}"

    def action_open_log(self) -> None:
        job, hosts = self._job, self.session.hosts
        if job and hosts:
            self.app.push_screen(FarLogScreen(self.session.home, hosts, self._copy.host, job))
        elif job:
            self.notify(f"{self._copy.host} is not connected.", severity="warning")

    def action_open_card(self) -> None:
        self.app.push_screen(FarCardScreen(self.session, self.job_id, self.member, self._open_features))

    def action_open_features(self) -> None:
        self._open_features(self.member)

    def action_compare(self) -> None:
        """Open the large curve or, if jobs on this host are marked, the comparison with them."""
        if not self._marked:
            super().action_compare()
        elif len(self._marked) >= MOST_RUNS:
            self.notify(f"At most {MOST_RUNS} jobs can be compared; unmark some with space.", severity="warning")
        else:
            copied = CopiedRun(self._copy.data, self.job_id, self._copy.host)
            self.app.push_screen(CompareScreen(self.session.home, self._marked, copied=copied))

    def action_clone_job(self) -> None:
        """Open the launch form with the job's settings; if they run code, ask first."""
        if self.session.home.actions.refused():
            return
        try:
            was = clone_settings(self._copy.data, self.job_id)
        except (UserError, OSError) as error:
            self.notify(sentence(error), title="Not cloned", severity="error", markup=False)
            return
        clone = partial(self._clone, was)
        if code := list(code_in(to_table(was))):
            question = question_about(code, Path(f"job {self.job_id} on {self._copy.host}"))
            self.app.push_screen(Confirm(question, yes="Use"), lambda yes: clone() if yes else None)
        else:
            clone()

    def _clone(self, was: AnyJob) -> None:
        home = self.session.home
        start = msgspec.structs.replace(was, name=free_name(was.name, (job.name for job in home.jobs)))
        if self._only_for_first and self.app.screen is self:
            self.app.pop_screen()  # the form does not need the copy
        home.go.open_clone(self.job_id, was, start, self._copy.host)
        self.app.notify(f"Its paths are on {self._copy.host}; F6 launches it on another host.", markup=False)

    def _open_features(self, member: str) -> None:
        if self._progress:
            return  # the features are being copied
        if self._copy.state.features:
            self._progress = "reading its features"
            self.post_message(self.Changed())
            self._fetch_features(member)
        else:
            self.notify(f"Job {self.job_id} on {self._copy.host} has no max-activating examples.", severity="warning")

    @work(thread=True, exit_on_error=False)
    def _fetch_features(self, member: str) -> None:
        try:
            if self._copy.fetch_features(self._show_progress):
                screen = FeaturesScreen(self.session, self.job_id, member)
                self.app.call_from_thread(self.app.push_screen, screen)
        except UserError as error:
            self.app.call_from_thread(self.notify, sentence(error), severity="warning", markup=False)
        finally:
            self._progress = ""
            self.post_message(self.Changed())

    def _show_progress(self, received: int, total: int) -> None:
        self._progress = f"reading its features: {gibibytes(received)} of {gibibytes(total)}"
        self.post_message(self.Changed())


def open_far_job(
    app: App[None], session: Session, hosts: Hosts, host: str, job: JobView, marked: Sequence[int], then: str
) -> None:
    """Show a job from another host, and call the action `then` once the job has been read."""
    try:
        copy = hosts.copy(host, job.id)
    except (OSError, UserError) as error:
        why = f"Job {job.id} on {host} cannot be copied to this host: {sentence(error)}."
        app.notify(why, severity="error", markup=False)
        return
    session.go.show(FarJobScreen(app, session, copy, marked, then))
