"""The actions on jobs: ask before destructive changes, work off the main thread, and report the result."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

from sae_tui.doctor.session import guarantee
from sae_tui.gpu.monitor import Monitor
from sae_tui.jobs import edits, environment, store_access
from sae_tui.jobs.evaluation import request
from sae_tui.jobs.evaluation.offer import EvaluationChoice, EvaluationOffer, offer_of
from sae_tui.jobs.gpus.availability import GpuChoice
from sae_tui.jobs.gpus.occupancy import name_elsewhere
from sae_tui.jobs.known_failures import remedy
from sae_tui.jobs.launch import launched, launching, placement
from sae_tui.jobs.launch.clone import half_batch
from sae_tui.jobs.launch.resume import resume
from sae_tui.jobs.output import extracts
from sae_tui.jobs.queue.after import waiting_for
from sae_tui.jobs.queue.promised import promised_by_active, writers_of
from sae_tui.jobs.states import ENDED, describe_state, is_cooling, phase_words, stands
from sae_tui.jobs.upkeep import trash
from sae_tui.jobs.view.reader import JobView
from sae_tui.settings import Settings
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.planning.hardware import read_box
from trainer.contract.settings.job_file import AnyJob
from trainer.contract.settings.schedule import CoolDown
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState
from trainer.contract.wording import plural

Edit = Callable[[DataDir, Control, int], str]
ONLY_SHOWN = "This view is read-only; start it without --readonly, or use `serve` with --write."


class CurrentState(Protocol):
    """Gives access to the current GPUs and jobs."""

    data: DataDir
    monitor: Monitor
    settings: Settings
    readonly: bool

    @property
    def jobs(self) -> tuple[JobView, ...]: ...
    def choices(self) -> tuple[GpuChoice, ...]: ...


# The label of the answer that cools a training down before it stops.
FINISH_EARLY = "Finish early"


class Also(NamedTuple):
    """An alternative answer to a question, with the action that it starts."""

    label: str
    act: Callable[[], object]


class Front(Protocol):
    """Notifies the user, asks questions, and runs work off the main thread."""

    def notify(self, message: str, *, severity: Literal["information", "warning", "error"]) -> None: ...
    def ask(self, question: str, yes: str, then: Callable[[], object], also: Also | None = None) -> None: ...
    def do(self, act: Callable[[], str]) -> object: ...


def steps_to_finish(job: Job) -> int | None:
    """Return the number of cool-down steps if the job is asked to finish now; None if it cannot finish early."""
    makes_steps = job.state in (JobState.RUNNING, JobState.STALLED) and not is_cooling(job)
    if not makes_steps or not job.total_steps or extracts(job.config):
        return None
    cool_down = CoolDown.after(job.step, job.total_steps)
    return cool_down.end - cool_down.begin if cool_down else None


def early_words(steps: int) -> str:
    """Return a sentence that explains what "Finish early" does to a job that would cool down over `steps` steps."""
    return f"Or finish it early: it cools down over {plural(steps, 'step')}, which improves its quality most."


def _stop_question(job: JobView) -> tuple[str, str]:
    """Return the question to ask before a job is stopped, and the label of the yes button."""
    which = f"job {job.id} ({job.name})"
    if is_cooling(job):
        return f"J{which[1:]} is {phase_words(job)}. Stop it now? It saves a checkpoint first.", "Stop"
    if (steps := steps_to_finish(job)) is not None:
        return f"Stop {which}? It saves a checkpoint first.\n\n{early_words(steps)}", "Stop"
    if job.state != JobState.QUEUED:
        kept = "It keeps its complete shards." if extracts(job.config) else "It saves a checkpoint first."
        return f"Stop {which}? {kept}", "Stop"
    if not job.attempt:
        return f"Cancel {which}? It has not started, so nothing is lost.", "Cancel it"
    return f"Stop {which}? It is {describe_state(job).word}; it keeps what it has saved.", "Stop"


class JobActions:
    """Changes jobs, selected by id."""

    def __init__(self, known: CurrentState, front: Front) -> None:
        self._known = known
        self._front = front
        # The ids of deleted jobs that can be restored, one list per deletion.
        self.thrown_away: list[list[int]] = []
        # The ids of jobs that were seen alive: only their end is reported.
        self._active: set[int] = set()
        self._one_edit = threading.Lock()

    def job(self, job_id: int) -> JobView | None:
        """Return the job as last read. If it is gone, notify the user and return None."""
        view = next((one for one in self._known.jobs if one.id == job_id), None)
        if view is None:
            self._front.notify(f"There is no job {job_id}.", severity="warning")
        return view

    def refused(self) -> bool:
        """Return True in read-only mode, and notify the user in that case."""
        if self._known.readonly:
            self._front.notify(ONLY_SHOWN, severity="warning")
        return self._known.readonly

    # launching

    def launch(self, jobs: Sequence[AnyJob], parent: int | None = None) -> list[int]:
        """Launch checked jobs and return their ids. This blocks on the disk and until the supervisors have started.

        Raise `UserError` in read-only mode.
        """
        if self._known.readonly:
            raise UserError(ONLY_SHOWN)
        monitor = self._known.monitor
        source = name_elsewhere(monitor.source_name, len(monitor.latest()))
        placed = [(job, self._place(job)) for job in jobs]
        # The SAEs of a sweep are launched together and read the same rows.
        after = writers_of(jobs[0], self._known.jobs)
        return launching.launch_all(self._known.data, placed, gpu_source=source, parent=parent, after=after)

    def tell_launched(self, job_ids: Sequence[int], is_over: Callable[[], bool]) -> str:
        """Wait until the outcome of new jobs is known or `is_over` returns True; return a sentence about it."""
        logout = guarantee(self._known.data)
        but = logout.sentence if logout.level == "warning" else ""
        return launched.describe_launch(self._known.data, job_ids, is_over=is_over, but=but)

    def _place(self, job: AnyJob) -> placement.Placement:
        session = self._known
        with environment.judged_there(job):
            return placement.place(
                job, session.choices(), source_cuda=session.monitor.cuda,
                multi_gpu_enabled=session.settings.multi_gpu_enabled,
                speeds=read_box(session.data.box_file), past=session.jobs,
                promises=promised_by_active(session.jobs),
            )  # fmt: skip

    # stopping, pausing, resuming

    def stop(self, job_id: int) -> None:
        """Ask a running job to save and stop. If it was asked before, offer to kill it."""
        job = self.job(job_id)
        if job is None or self.refused():
            return
        if job.evaluation:
            question = f"Stop the evaluation of job {job_id} ({job.name})? Earlier measurements stay."
            self.ask(question, "Stop it", functools.partial(request.stop, self._known.data, job_id))
            return
        if self._has_ended(job):
            return
        if job.state is JobState.STOPPING or job.stop_requested:
            lost = "Rows after its last shard" if extracts(job.config) else "Steps after its last checkpoint"
            question = f"Job {job_id} ({job.name}) is stopping. End it at once? {lost} are lost."
            self.ask(question, "End it", functools.partial(edits.kill, self._known.data, job_id))
        else:
            early = functools.partial(edits.finish, self._known.data, job_id)
            offered = steps_to_finish(job) is not None
            self.ask(
                *_stop_question(job),
                functools.partial(edits.stop, self._known.data, job_id),
                Also(FINISH_EARLY, lambda: self.do(early)) if offered else None,
            )

    def pause(self, job_id: int) -> None:
        """Ask a job to save and pause. Its GPUs are free until it is resumed."""
        job = self.job(job_id)
        if job is not None and not self.refused() and not self._has_ended(job):
            self.do(functools.partial(edits.pause, self._known.data, job_id))

    def resume(self, job_id: int) -> None:
        """Release a held or paused job; resume an ended job from its last good checkpoint."""
        job = self.job(job_id)
        if job is None or self.refused():
            return
        if job.state is JobState.QUEUED:
            self.edit([job_id], edits.release)
        elif not job.state.is_final:
            self._front.notify(f"Job {job_id} {stands(job)}.", severity="warning")
        elif (cure := remedy(job.error)) and not cure.may_repeat:
            question = (
                f"Job {job_id} {ENDED[job.state]}: {job.error}\n\n"
                f"Without a change it will probably fail again; {cure.text}. Resume it anyway?"
            )
            self.ask(question, "Resume", functools.partial(self._resume, job_id))
        else:
            self.do(functools.partial(self._resume, job_id))

    def _resume(self, job_id: int) -> str:
        plan = resume(self._known.data, job_id, self._place)
        return "; ".join([f"job {job_id} {plan.sentence}", *plan.notes])

    def _has_ended(self, job: JobView) -> bool:
        if job.state.is_final:
            self._front.notify(f"Job {job.id} {ENDED[job.state]}.", severity="warning")
        return job.state.is_final

    # evaluating

    def offer_evaluation(self, job_id: int) -> EvaluationOffer | None:
        """Return the available parts of an evaluation and how long each takes; None if there is no such job.

        Raise `UserError` if the job cannot be evaluated now.
        """
        job = self.job(job_id)
        if job is None:
            return None
        return offer_of(self._known.data, job, self._idle_gpu(job), cuda=self._known.monitor.cuda)

    def evaluate(self, job_id: int, asked: EvaluationChoice) -> None:
        """Start the evaluation of a job's SAEs. Its end is reported as an event of the job."""
        job = self.job(job_id)
        if job is not None and not self.refused():
            self.do(functools.partial(self._evaluate, job, asked))

    def _evaluate(self, job: Job, asked: EvaluationChoice) -> str:
        gpu = self._idle_gpu(job) if asked.on_gpu else None
        return request.evaluate(self._known.data, asked.request(job, gpu))

    def _idle_gpu(self, job: Job) -> request.ReservedGpu | None:
        known = self._known
        return request.idle_gpu(known.data, job, known.choices(), known.monitor.source_name)

    # deleting

    def delete(self, job_ids: Sequence[int]) -> None:
        """Delete the jobs after asking once. This can be undone until the app quits."""
        jobs = [job for job_id in job_ids if (job := self.job(job_id))]
        if self.refused():
            return
        if living := [job for job in jobs if not job.state.is_final]:
            self._front.notify(f"Job {living[0].id} {stands(living[0])}; stop it first.", severity="warning")
        elif jobs:
            which = f"job {jobs[0].id} ({jobs[0].name})" if len(jobs) == 1 else f"{len(jobs)} jobs"
            question = f"Delete {which} with checkpoints, logs and SAEs? You can restore them with u until you quit."
            if waiting := waiting_for(self._known.jobs, [job.id for job in jobs]):
                question += f"\n\n{waiting[0].upper()}{waiting[1:]}."
            self.ask(question, "Delete", functools.partial(self._delete, [job.id for job in jobs]))

    def _delete(self, job_ids: list[int]) -> str:
        messages = trash.throw_all_away(self._known.data, job_ids)
        self.thrown_away.append(job_ids)
        return f"{messages[0] if len(messages) == 1 else f'{len(messages)} jobs deleted'}; press u to undo"

    def undo_delete(self) -> None:
        """Restore the jobs of the last deletion."""
        if self.refused():
            return
        if not self.thrown_away:
            self._front.notify("No job was deleted since the app started.", severity="warning")
            return
        job_ids = self.thrown_away.pop()
        self.do(lambda: "; ".join(trash.put_all_back(self._known.data, job_ids)))

    def empty_trash(self) -> None:
        """Remove deleted jobs for good. The next start of an app removes any that cannot be removed now."""
        with contextlib.suppress(UserError, OSError):
            trash.empty(self._known.data, [job_id for job_ids in self.thrown_away for job_id in job_ids])

    # other actions

    def newly_ended(self) -> list[JobView]:
        """Return the jobs that were alive at the last call and have ended since then."""
        ended = [job for job in self._known.jobs if job.state.is_final and job.id in self._active]
        self._active |= {job.id for job in self._known.jobs if not job.state.is_final}
        self._active -= {job.id for job in ended}
        return ended

    def half_batch(self, job: JobView, config: AnyJob) -> list[str]:
        """Return overrides that halve a clone's batch size if the job ran out of GPU memory; else an empty list."""
        cure = remedy(job.error)
        return half_batch(config, job.world_size) if cure and cure.kind == "gpu-memory" else []

    def edit(self, job_ids: Iterable[int], edit: Edit) -> None:
        """Change jobs with a function of `edits`, off the main thread, and report the result.

        Changes run one after the other, since each may build on the one before.
        """

        def act() -> str:
            with self._one_edit:
                return "\n".join(self._edit_one(job_id, edit) for job_id in job_ids)

        self.do(act)

    def _edit_one(self, job_id: int, edit: Edit) -> str:
        with store_access.existing(self._known.data, job_id) as control:
            return edit(self._known.data, control, job_id)

    def ask(self, question: str, yes: str, act: Callable[[], str], also: Also | None = None) -> None:
        """Ask a question; if the answer is yes (a button labelled `yes`), run `act` off the main thread."""
        if not self.refused():
            self._front.ask(question, yes, lambda: self.do(act), *([also] if also else []))

    def do(self, act: Callable[[], str]) -> None:
        """Run `act`, which changes something, off the main thread and report the result.

        Every change that the app makes goes through here, so read-only mode is enforced even if a screen forgets to
        check.
        """
        if not self.refused():
            self._front.do(act)
