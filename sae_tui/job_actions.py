"""What the app does to jobs: always on a thread, with a question before harm, and told what came of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from textual import on, work
from textual.worker import get_current_worker

from sae_tui.doctor.session import guarantee
from sae_tui.jobs import edits, store_access
from sae_tui.jobs.cards.occupancy import reopened_as
from sae_tui.jobs.known_failures import remedy
from sae_tui.jobs.launch import launched, launching, placement
from sae_tui.jobs.launch.clone import half_batch
from sae_tui.jobs.launch.resume import resume
from sae_tui.jobs.states import ENDED, shown, stands
from sae_tui.jobs.upkeep import trash
from sae_tui.messages import Done, Launched
from sae_tui.notices import Notices
from sae_tui.widgets.confirm import Confirm
from trainer.contract.errors import UserError, sentence
from trainer.contract.planning.hardware import read_box
from trainer.contract.printable import printable
from trainer.contract.settings.job import JobConfig
from trainer.contract.store.states import JobState

if TYPE_CHECKING:
    from sae_tui.gpu.monitor import Monitor
    from sae_tui.jobs.cards.availability import GpuChoice
    from sae_tui.jobs.view.reader import JobView
    from sae_tui.jobs.view.watcher import Watcher
    from sae_tui.settings import Settings
    from trainer.contract.paths import DataDir
    from trainer.contract.store.rows import Job


def _stop_question(job: Job) -> tuple[str, str]:
    """What is asked before a job is stopped, and the word for yes."""
    which = f"job {job.id} ({job.name})"
    if job.state != JobState.QUEUED:
        return f"Stop {which}? It saves a checkpoint first.", "Stop"
    if not job.attempt:
        return f"Cancel {which}? It has not started, so nothing is lost.", "Cancel it"
    return f"Stop {which}? It is {shown(job).word}; what it has saved stays.", "Stop"


class JobActions(Notices):
    """The part of the app that changes jobs; screens call it with a job's id, never with a row of a table."""

    data: DataDir
    monitor: Monitor
    settings: Settings
    watcher: Watcher
    jobs: tuple[JobView, ...]
    choices: Callable[[], tuple[GpuChoice, ...]]

    def job(self, job_id: int) -> JobView | None:
        """The job as last read; says so where there is none."""
        found = next((one for one in self.jobs if one.id == job_id), None)
        if found is None:
            self.notify(f"There is no job {job_id}.", severity="warning")
        return found

    # launching

    def run_launch(self, jobs: Sequence[JobConfig], parent: int | None = None) -> None:
        """Launches checked jobs in the background."""
        self._launch(tuple(jobs), parent)

    @work(thread=True, group="actions", exit_on_error=False)
    def _launch(self, jobs: tuple[JobConfig, ...], parent: int | None) -> None:
        source = reopened_as(self.monitor.source_name, len(self.monitor.latest()))
        try:
            placed = [(job, self._place(job)) for job in jobs]
            job_ids = launching.launch_all(self.data, placed, gpu_source=source, parent=parent)
        except (UserError, OSError) as error:
            self.post_message(Launched(None, sentence(error)))
            return
        self.post_message(Launched(job_ids[-1]))
        self._tell_launch(job_ids)

    def _tell_launch(self, job_ids: list[int]) -> None:
        logout, worker = guarantee(self.data), get_current_worker()
        but = logout.sentence if logout.level == "warning" else ""
        with contextlib.suppress(UserError):  # of jobs that were deleted meanwhile there is nothing to tell
            said = launched.told(self.data, job_ids, is_over=lambda: worker.is_cancelled, but=but)
            self.post_message(Done(said))

    def _place(self, job: JobConfig) -> placement.Placement:
        enabled = self.settings.multi_gpu_enabled
        return placement.place(
            job, self.choices(), source_cuda=self.monitor.cuda, multi_gpu_enabled=enabled,
            speeds=read_box(self.data.box_file), past=self.jobs,
        )  # fmt: skip

    # stopping, pausing, resuming

    def stop_job(self, job_id: int) -> None:
        """Asks a running job to save and stop; asked again, offers to end it at once."""
        job = self.job(job_id)
        if job is None or self._has_ended(job):
            return
        if job.state is JobState.STOPPING or job.stop_requested:
            question = (
                f"Job {job_id} ({job.name}) is stopping. End it at once? Steps since its last checkpoint are lost."
            )
            self._after(question, "End it", functools.partial(edits.kill, self.data, job_id))
        else:
            self._after(*_stop_question(job), functools.partial(edits.stop, self.data, job_id))

    def pause_job(self, job_id: int) -> None:
        """Has a job save and wait, held; its GPUs are free until it is resumed."""
        job = self.job(job_id)
        if job is not None and not self._has_ended(job):
            self.do(functools.partial(edits.pause, self.data, job_id))

    def continue_job(self, job_id: int) -> None:
        """Releases a job that is held or paused, and resumes one that has ended from its last good checkpoint."""
        job = self.job(job_id)
        if job is None:
            return
        if job.state is JobState.QUEUED:
            self.edit_job(job_id, edits.release)
        elif not job.state.is_final:
            self.notify(f"Job {job_id} {stands(job)}.", severity="warning")
        elif (known := remedy(job.error)) and not known.may_repeat:
            question = (
                f"Job {job_id} {ENDED[job.state]}: {job.error}\n\n"
                f"Unchanged it is likely to fail again; {known.text}. Resume it all the same?"
            )
            self._after(question, "Resume", functools.partial(self._resume, job_id))
        else:
            self.do(functools.partial(self._resume, job_id))

    def _resume(self, job_id: int) -> str:
        plan = resume(self.data, job_id, self._place)
        return "; ".join([f"job {job_id} {plan.sentence}", *plan.notes])

    def _has_ended(self, job: JobView) -> bool:
        if job.state.is_final:
            self.notify(f"Job {job.id} {ENDED[job.state]}.", severity="warning")
        return job.state.is_final

    # deleting

    def delete_jobs(self, job_ids: Sequence[int]) -> None:
        """Asks once; until the app is left it can be undone."""
        found = [job for job_id in job_ids if (job := self.job(job_id))]
        if living := [job for job in found if not job.state.is_final]:
            self.notify(f"Job {living[0].id} {stands(living[0])}; stop it first.", severity="warning")
        elif found:
            which = f"job {found[0].id} ({found[0].name})" if len(found) == 1 else f"{len(found)} jobs"
            question = f"Delete {which} with checkpoints, logs and SAEs? Until you quit, u brings them back."
            self._after(question, "Delete", functools.partial(self._delete, [job.id for job in found]))

    def _delete(self, job_ids: list[int]) -> str:
        said = trash.throw_all_away(self.data, job_ids)
        self.thrown_away.append(job_ids)
        return f"{said[0] if len(said) == 1 else f'{len(said)} jobs are deleted'}; u brings back"

    def action_undo_delete(self) -> None:
        """Brings back what was deleted last."""
        if not self.thrown_away:
            self.notify("Nothing was deleted since the app was started.", severity="warning")
            return
        job_ids = self.thrown_away.pop()
        self.do(lambda: "; ".join(trash.put_all_back(self.data, job_ids)))

    @functools.cached_property
    def thrown_away(self) -> list[list[int]]:
        """What can be brought back, by deletions."""
        return []

    def empty_trash(self) -> None:
        """Removes for good what was deleted; what cannot be is removed when an app is started again."""
        with contextlib.suppress(UserError, OSError):
            trash.empty(self.data, [job_id for job_ids in self.thrown_away for job_id in job_ids])

    # the rest

    @functools.cached_property
    def _active(self) -> set[int]:
        """The jobs that were seen alive: of those, the end is news."""
        return set()

    def _tell_endings(self) -> None:
        """A toast and the terminal's bell, or a desktop note by OSC 9, for every job that has ended since."""
        for job in self.jobs:
            if not job.state.is_final:
                self._active.add(job.id)
            elif job.id in self._active:
                self._active.discard(job.id)
                self._tell_end(job)

    def _tell_end(self, job: JobView) -> None:
        said = f"Job {job.id} ({job.name}) {ENDED[job.state]}" + (f": {job.error}" if job.error else "")
        bad = job.state in (JobState.FAILED, JobState.LOST)
        self.notify(said, severity="error" if bad else "information", markup=False)
        if self.settings.notify == "bell":
            self.bell()
        elif self.settings.notify == "terminal" and self._driver is not None:
            self._driver.write(f"\x1b]9;{printable(said)}\x07")

    def half_batch(self, job: JobView, config: JobConfig) -> list[str]:
        """The settings to change in a clone of a job that ended for lack of memory; none for others."""
        known = remedy(job.error)
        return half_batch(config) if known and known.kind == "gpu-memory" else []

    def edit_job(self, job_id: int, edit: Callable[..., str], *values: object) -> None:
        """Changes a job's row by one of the functions of `edits`."""

        def act() -> str:
            with store_access.existing(self.data, job_id) as control:
                return edit(self.data, control, job_id, *values)

        self.do(act)

    def _after(self, question: str, yes: str, act: Callable[[], str]) -> None:
        self.push_screen(Confirm(question, yes=yes), lambda answer: self.do(act) if answer else None)

    @work(thread=True, group="actions", exit_on_error=False)
    def do(self, act: Callable[[], str]) -> None:
        """Does something off the main thread and tells what came of it."""
        try:
            self.post_message(Done(act()))
        except (UserError, OSError) as error:
            self.post_message(Done(sentence(error), failed=True))

    @on(Done)
    def _done(self, event: Done) -> None:
        text = event.text[:1].upper() + event.text[1:]
        text += "" if text.endswith((".", "!", "?")) else "."
        self.notify(text, severity="error" if event.failed else "information", markup=False)
        self.watcher.poke()
