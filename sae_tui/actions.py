"""Runs the user's actions on jobs.

An action asks for confirmation before a destructive change and reports its result.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
from textual.app import App
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.worker import get_current_worker

from sae_tui.doctor.session import guarantee
from sae_tui.gpu.monitor import Monitor
from sae_tui.jobs import bulk, edits, environment
from sae_tui.jobs.asking import asked_of, stored_with
from sae_tui.jobs.evaluation import request
from sae_tui.jobs.evaluation.offer import EvaluationChoice, EvaluationOffer, offer_of
from sae_tui.jobs.gpus.availability import GpuChoice
from sae_tui.jobs.gpus.occupancy import name_elsewhere
from sae_tui.jobs.launch import launching, placement
from sae_tui.jobs.launch.resume import resume
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.queue.after import waiting_for
from sae_tui.jobs.queue.promised import promised_by_active, writers_of
from sae_tui.jobs.states import ENDED, describe_state, is_cooling, phase_words, stands
from sae_tui.jobs.upkeep import trash
from sae_tui.jobs.view.arrays import ArrayView
from sae_tui.jobs.view.postmortem import remedy_of
from sae_tui.jobs.view.reader import JobView
from sae_tui.jobs.view.watcher import Watcher
from sae_tui.settings import Settings, change_settings
from sae_tui.widgets.confirm import Confirm
from trainer.contract.errors import UserError, sentence
from trainer.contract.paths import DataDir
from trainer.contract.settings.backends import cluster_of
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.schedule import CoolDown
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import ACTIVE, JobState
from trainer.contract.wording import plural

# A supervisor needs up to 1 s (3 s on a busy machine) to read the GPUs and decide whether a new job can start.
KNOWN_WITHIN_S = 3.0
POLL_S = 0.1
_STARTS_WITH_PATH = re.compile(r"[a-z_0-9]+(\.[a-z_0-9]+)+: ")


def describe_launch(
    data: DataDir, job_ids: Sequence[int], *, is_over: Callable[[], bool] = lambda: False, but: str = ""
) -> str:
    """Return a message about the launched jobs.

    Wait up to 3 s for all jobs to start or report why they are waiting; stop waiting when `is_over` returns True.

    If `but` is not empty, it replaces the sentence saying that jobs keep running after the app quits.
    """
    deadline = time.monotonic() + KNOWN_WITHIN_S
    with contextlib.closing(Control(data.control_db, readonly=True)) as control:
        while True:
            jobs = [control.job(job_id) for job_id in job_ids]
            if all(map(_is_known, jobs)) or time.monotonic() > deadline or is_over():
                return _launch_message(jobs, but)
            time.sleep(POLL_S)


def _is_known(job: Job) -> bool:
    return job.state != JobState.QUEUED or job.held or job.waits_for is not None


def _launch_message(jobs: Sequence[Job], but: str) -> str:
    started = [job for job in jobs if job.state != JobState.QUEUED]
    message = _of_one(jobs[0]) if len(jobs) == 1 else _of_many(len(started), len(jobs) - len(started))
    if but:
        return f"{message}. But {but}."
    if not any(job.state in ACTIVE for job in started):
        return f"{message}."
    return f"{message}. {'It keeps' if len(jobs) == 1 else 'They keep'} running if you quit."


def _of_one(job: Job) -> str:
    if job.state.is_final:
        return f'Job {job.id} "{job.name}" {ENDED[job.state]}' + (f": {job.error}" if job.error else "")
    if job.state != JobState.QUEUED:
        return f'Job {job.id} "{job.name}" started {_where(job)}'
    return f"Job {job.id} is waiting: {job.waits_for}" if job.waits_for else f"Job {job.id} is queued"


def _of_many(started: int, waiting: int) -> str:
    parts = [f"{started} started"] if started else []
    parts += [f"{waiting} {'is' if waiting == 1 else 'are'} waiting"] if waiting else []
    return f"{started + waiting} jobs launched: {', '.join(parts)}"


def _where(job: Job) -> str:
    if job.gpu_ids:
        return f"on GPU {','.join(map(str, job.gpu_ids))}"
    if cluster := cluster_of(job.backend):
        return f"through {cluster}"
    return "on the CPU" if job.world_size == 1 else f"on {job.world_size} CPU processes"


Edit = Callable[[DataDir, Control, int], str]
ONLY_SHOWN = "This view is read-only; start it without --readonly, or use `serve` with --write."
# The label of the button that makes a training run cool down before stopping.
FINISH_EARLY = "Finish early"
_BEGINS_WITHIN_S = 2.0
# With this many jobs or more, a message contains a summary and the first failure instead of every outcome.
_MANY = 4


class Navigation(Protocol):
    """The `Router` methods called by actions and screens.

    Importing `Router` itself would create a circular import.
    """

    def show_dashboard(self) -> None: ...
    def show(self, screen: Screen[None]) -> None: ...
    def open_job(self, job_id: int) -> None: ...
    def clone_job(self, job_id: int) -> None: ...
    def open_clone(self, job_id: int, was: AnyJob, start: AnyJob, host: str = "") -> None: ...
    def new_job(self, kind: str = "") -> None: ...
    def after_launch(self, job_id: int | None) -> None: ...


class CurrentState(Protocol):
    """The `Session` attributes used by `Actions`. Importing `Session` itself would create a circular import."""

    go: Navigation
    data: DataDir
    monitor: Monitor
    watcher: Watcher
    settings: Settings
    readonly: bool

    @property
    def jobs(self) -> tuple[JobView, ...]: ...
    def choices(self) -> tuple[GpuChoice, ...]: ...


class Also(NamedTuple):
    """An additional answer to a question, and the action it starts."""

    label: str
    act: Callable[[], str]


def steps_to_finish(job: Job) -> int | None:
    """Return how many cool-down steps the job would run if it finished now, or None if it cannot finish early."""
    makes_steps = job.state in (JobState.RUNNING, JobState.STALLED) and not is_cooling(job)
    if not makes_steps or not job.total_steps or not kind_of(job.config).trains:
        return None
    cool_down = CoolDown.after(job.step, job.total_steps)
    return cool_down.end - cool_down.begin if cool_down else None


def early_words(steps: int) -> str:
    """Return a sentence explaining what "Finish early" does to a job that would cool down over `steps` steps."""
    return f"Or finish it early: it cools down over {plural(steps, 'step')}, the phase that improves its quality most."


def _stop_question(job: JobView) -> tuple[str, str]:
    """Return the question to ask before stopping a job, and the label of the yes button."""
    which = f"job {job.id} ({job.name})"
    if is_cooling(job):
        return f"J{which[1:]} is {phase_words(job)}. Stop it now? It saves a checkpoint first.", "Stop"
    if (steps := steps_to_finish(job)) is not None:
        return f"Stop {which}? It saves a checkpoint first.\n\n{early_words(steps)}", "Stop"
    if job.state != JobState.QUEUED:
        return f"Stop {which}? {asked_of(job.config).first}", "Stop"
    if not job.attempt:
        return f"Cancel {which}? It has not started, so nothing is lost.", "Cancel it"
    return f"Stop {which}? It is {describe_state(job).word}; it keeps what it has saved.", "Stop"


def _what_becomes(jobs: Sequence[JobView], verb: str, queued: str) -> str:
    """Return text like `4 running jobs will save and stop; 20 queued jobs will leave the queue`."""
    n_queued = sum(job.state is JobState.QUEUED for job in jobs)
    running = f"{plural(len(jobs) - n_queued, 'running job')} will save and {verb}"
    waiting = f"{plural(n_queued, 'queued job')} will {queued}"
    return "; ".join([*([running] if n_queued < len(jobs) else []), *([waiting] if n_queued else [])])


class Actions:
    """Launches and changes jobs in worker threads."""

    def __init__(self, state: CurrentState, app: App[None]) -> None:
        self._state = state
        self._app = app
        # The ids of deleted jobs that can be restored, one list per deletion.
        self.thrown_away: list[list[int]] = []
        # The ids of jobs that were unfinished when last seen. The app reports the end of a job only if its id is listed
        # here.
        self._active: set[int] = set()
        self._one_edit = threading.Lock()

    def job(self, job_id: int) -> JobView | None:
        """Return the latest state of a job. If the job does not exist, notify the user and return None."""
        view = next((one for one in self._state.jobs if one.id == job_id), None)
        if view is None:
            self._app.notify(f"There is no job {job_id}.", severity="warning")
        return view

    def refused(self) -> bool:
        """Return whether the app is in read-only mode; if it is, notify the user."""
        if self._state.readonly:
            self._app.notify(ONLY_SHOWN, severity="warning")
        return self._state.readonly

    def keep(self, what: str, **changes: object) -> None:
        """Change settings immediately and, unless in read-only mode, save them in the settings file."""
        state = self._state
        state.settings = msgspec.structs.replace(state.settings, **changes)
        if state.readonly:
            self._app.notify(f"{what}: applies until you quit; settings are read-only here.", markup=False)
            return
        try:
            change_settings(state.data.settings_file, changes)
        except (UserError, OSError) as error:
            self._app.notify(sentence(error), title=f"{what}: not saved", severity="error", markup=False)

    # launching

    def adopt(self, pid: int, name: str) -> None:
        """Ask for confirmation, then turn a running process into a job."""
        state = self._state

        def act() -> str:
            from sae_tui.jobs.launch.adopt import adopt  # slow to import

            samples = state.monitor.latest()
            source = name_elsewhere(state.monitor.source_name, len(samples))
            return f"process {pid} is now job {adopt(state.data, pid, samples, gpu_source=source)}"

        self.ask(f"Turn {name} into a job? It keeps running, and its GPUs are leased to it.", "Adopt", act)

    def launch_jobs(self, jobs: Sequence[AnyJob], question: str = "", parent: int | None = None) -> None:
        """Return to the dashboard and launch validated jobs. If `question` is not empty, ask for confirmation first."""
        if question:
            dialog = Confirm(question, yes="Launch")
            self._app.push_screen(dialog, lambda yes: self.launch_jobs(jobs, parent=parent) if yes else None)
            return
        state = self._state

        def act() -> str:
            from sae_tui.jobs.launch import kept_draft  # slow to import

            problem = ""
            try:
                source = name_elsewhere(state.monitor.source_name, len(state.monitor.latest()))
                placed = [(job, self._place(job)) for job in jobs]
                # All jobs in a sweep train on the same rows, so they wait for the same jobs.
                after = writers_of(jobs[0], state.jobs)
                job_ids = launching.launch_all(
                    state.data, placed, gpu_source=source, parent=parent, after=after, as_array=len(jobs) > 1
                )
            except launching.NotStarted as error:
                job_ids, problem = error.job_ids, str(error)
                self._app.call_later(self._tell, problem, "warning")
            except Exception as error:
                bug = f"the launch failed because of a bug in sae-tui: {error!r}"
                why = sentence(error) if isinstance(error, UserError | OSError) else bug
                self._app.call_later(self._end_launch, None, why)
                return ""
            kept_draft.drop(state.data, jobs[0].kind)
            self._app.call_later(self._end_launch, job_ids[-1])
            return "" if problem else self._outcome(job_ids)

        state.go.show_dashboard()
        self.do(act)

    def _end_launch(self, job_id: int | None, why_not: str = "") -> None:
        self._state.go.after_launch(job_id)
        if why_not:
            self._app.notify(why_not, title="Not launched", severity="error", markup=False)
        self._state.watcher.poke()

    def _outcome(self, job_ids: Sequence[int]) -> str:
        """Return a message about new jobs once their state is known, or "" if a job has been deleted."""
        worker = get_current_worker()
        try:
            logout = guarantee(self._state.data)
            but = logout.sentence if logout.level == "warning" else ""
            return describe_launch(self._state.data, job_ids, is_over=lambda: worker.is_cancelled, but=but)
        except UserError:
            return ""

    def _place(self, job: AnyJob) -> placement.Placement:
        state = self._state
        with environment.judged_there(job):
            choices = state.choices()
            proposal = placement.propose_here(
                job, choices, state.data, cuda=state.monitor.cuda, past=state.jobs,
                promises=promised_by_active(state.jobs),
            )  # fmt: skip
            return placement.place(proposal, choices, multi_gpu_enabled=state.settings.multi_gpu_enabled)

    # stopping, pausing, resuming

    def stop(self, job_id: int) -> None:
        """Ask a running job to save and stop. If the job is already stopping, offer to kill it."""
        job = self.job(job_id)
        if job is None or self.refused():
            return
        if job.evaluation:
            question = f"Stop the evaluation of job {job_id} ({job.name})? Earlier measurements are kept."
            self.ask(question, "Stop it", functools.partial(request.stop, self._state.data, job_id))
            return
        if self._has_ended(job):
            return
        if job.state is JobState.STOPPING or job.stop_requested:
            lost = asked_of(job.config).lost
            question = f"Job {job_id} ({job.name}) is stopping. Kill it now? {lost} will be lost."
            self.ask(question, "Kill it", functools.partial(edits.kill, self._state.data, job_id))
        else:
            early = functools.partial(edits.finish, self._state.data, job_id)
            offered = steps_to_finish(job) is not None
            also = Also(FINISH_EARLY, early) if offered else None
            self.ask(*_stop_question(job), functools.partial(edits.stop, self._state.data, job_id), also)

    def pause(self, job_id: int) -> None:
        """Ask a job to save and pause. The job's GPUs are free until the job is resumed."""
        job = self.job(job_id)
        if job is not None and not self.refused() and not self._has_ended(job):
            self.do(functools.partial(edits.pause, self._state.data, job_id))

    def resume(self, job_id: int) -> None:
        """Release a held or paused job; resume an ended job from its last good checkpoint.

        A command that has ended starts again from the beginning; if its state is `finished`, ask first.
        """
        job = self.job(job_id)
        if job is None or self.refused():
            return
        if job.state is JobState.QUEUED:
            self.edit([job_id], edits.release)
        elif not job.state.is_final:
            self._app.notify(f"Job {job_id} {stands(job)}.", severity="warning")
        elif kind_of(job.config).is_program and job.state is JobState.FINISHED:
            question = f"Job {job_id} ({job.name}) has finished. Run its command again from the start?"
            self.ask(question, "Run again", functools.partial(self._resume, job_id))
        elif (cure := remedy_of(job)) and not cure.may_repeat:
            question = (
                f"Job {job_id} {ENDED[job.state]}: {job.error}\n\n"
                f"Without a change it will probably fail again; {cure.text}. Resume it anyway?"
            )
            self.ask(question, "Resume", functools.partial(self._resume, job_id))
        else:
            self.do(functools.partial(self._resume, job_id))

    def _resume(self, job_id: int) -> str:
        plan = resume(self._state.data, job_id, self._place)
        return "; ".join([f"job {job_id} {plan.sentence}", *plan.notes])

    # arrays

    def stop_array(self, array: ArrayView) -> None:
        """Ask once, then stop all jobs in an array; if all of them are already stopping, offer to kill them."""
        living = [job for job in array.jobs if not job.state.is_final]
        asked = [job for job in living if not (job.state is JobState.STOPPING or job.stop_requested)]
        if living and not asked:
            question = f"All active jobs of {array.title} are stopping. Kill them now? Unsaved progress is lost."
            self._change_array(array, living, question, "Kill them", bulk.unless_ended(edits.kill), "killed")
            return
        question = f"Stop {array.title}? {_what_becomes(asked, 'stop', 'leave the queue')}."
        self._change_array(array, asked, question, "Stop all", bulk.unless_ended(edits.stop), "asked to stop")

    def pause_array(self, array: ArrayView) -> None:
        """Ask once, then pause the running jobs in an array and hold the queued ones."""
        living = [job for job in array.jobs if not job.state.is_final]
        question = f"Pause {array.title}? {_what_becomes(living, 'pause', 'be held')}."
        self._change_array(array, living, question, "Pause all", bulk.unless_ended(edits.pause), "paused")

    def hold_array(self, array: ArrayView) -> None:
        """Ask once, then hold the queued jobs in an array; if all of them are already held, release them."""
        free = [job for job in array.jobs if job.state is JobState.QUEUED and not job.held]
        if not free:
            self.release_array(array)
            return
        question = f"Hold {plural(len(free), 'queued job')} of {array.title}?"
        self._change_array(array, free, question, "Hold all", edits.hold, "held")

    def release_array(self, array: ArrayView) -> None:
        """Ask once, then release the held jobs in an array."""
        held = [job for job in array.jobs if job.state is JobState.QUEUED and job.held]
        question = f"Release {plural(len(held), 'held job')} of {array.title}?"
        self._change_array(array, held, question, "Release all", edits.release, "released")

    def _change_array(
        self, array: ArrayView, jobs: Sequence[JobView], question: str, yes: str, change: Edit, done: str
    ) -> None:
        if not jobs:
            self._app.notify(f"No job of {array.title} can be {done}.", severity="warning")
            return
        self.ask(question, yes, functools.partial(self._change_all, [job.id for job in jobs], change, done))

    def _change_all(self, job_ids: Sequence[int], change: Edit, done: str) -> str:
        """Change the jobs; return every outcome if there are few jobs, otherwise a summary with the first failure.

        Changes run one after the other, because each may depend on the previous one.
        """
        with self._one_edit:
            outcomes = list(bulk.change_all(self._state.data, job_ids, change))
        if len(outcomes) == 1 and outcomes[0].outcome != "done":
            raise UserError(outcomes[0].message)
        if len(outcomes) < _MANY:
            return "\n".join(one.message for one in outcomes)
        failed = [one.message for one in outcomes if one.outcome != "done"]
        return "\n".join([bulk.summary(outcomes, done), *failed[:1]])

    def _has_ended(self, job: JobView) -> bool:
        if job.state.is_final:
            self._app.notify(f"Job {job.id} {ENDED[job.state]}.", severity="warning")
        return job.state.is_final

    # evaluating

    def offer_evaluation(self, job_id: int) -> EvaluationOffer | None:
        """Return the available evaluation parts and how long each takes, or None if there is no such job.

        Raise `UserError` if the job cannot be evaluated now.
        """
        job = self.job(job_id)
        if job is None:
            return None
        return offer_of(self._state.data, job, self._idle_gpu(job), cuda=self._state.monitor.cuda)

    def evaluate(self, job_id: int, asked: EvaluationChoice) -> None:
        """Start evaluating a job's SAEs. A job event reports the end of the evaluation."""
        job = self.job(job_id)
        if job is not None and not self.refused():
            self.do(functools.partial(self._evaluate, job, asked))

    def _evaluate(self, job: Job, asked: EvaluationChoice) -> str:
        gpu = self._idle_gpu(job) if asked.on_gpu else None
        return request.evaluate(self._state.data, asked.request(job, gpu))

    def _idle_gpu(self, job: Job) -> request.ReservedGpu | None:
        state = self._state
        return request.idle_gpu(state.data, job, state.choices(), state.monitor.source_name)

    # deleting

    def delete(self, job_ids: Sequence[int]) -> None:
        """Ask once for confirmation, then delete the jobs. The deletion can be undone until the app quits."""
        jobs = [job for job_id in job_ids if (job := self.job(job_id))]
        if self.refused():
            return
        if living := [job for job in jobs if not job.state.is_final]:
            self._app.notify(f"Job {living[0].id} {stands(living[0])}; stop it first.", severity="warning")
        elif jobs:
            which = f"job {jobs[0].id} ({jobs[0].name})" if len(jobs) == 1 else f"{len(jobs)} jobs"
            question = f"Delete {which} with {stored_with(jobs)}? You can restore them with u until you quit."
            if waiting := waiting_for(self._state.jobs, [job.id for job in jobs]):
                question += f"\n\n{waiting[0].upper()}{waiting[1:]}."
            self.ask(question, "Delete", functools.partial(self._delete, [job.id for job in jobs]))

    def _delete(self, job_ids: list[int]) -> str:
        messages = trash.throw_all_away(self._state.data, job_ids)
        self.thrown_away.append(job_ids)
        return f"{messages[0] if len(messages) == 1 else f'{len(messages)} jobs deleted'}; press u to undo"

    def undo_delete(self) -> None:
        """Restore the jobs removed by the last deletion."""
        if self.refused():
            return
        if not self.thrown_away:
            self._app.notify("No job has been deleted since the app started.", severity="warning")
            return
        job_ids = self.thrown_away.pop()
        self.do(lambda: "; ".join(trash.put_all_back(self._state.data, job_ids)))

    def empty_trash(self) -> None:
        """Permanently remove the deleted jobs.

        Jobs that cannot be removed now are removed the next time the app starts.
        """
        with contextlib.suppress(UserError, OSError):
            trash.empty(self._state.data, [job_id for job_ids in self.thrown_away for job_id in job_ids])

    # other actions

    def newly_ended(self) -> list[JobView]:
        """Return the jobs that have ended since the last call."""
        ended = [job for job in self._state.jobs if job.state.is_final and job.id in self._active]
        self._active |= {job.id for job in self._state.jobs if not job.state.is_final}
        self._active -= {job.id for job in ended}
        return ended

    def edit(self, job_ids: Sequence[int], edit: Edit) -> None:
        """Apply a function from the `edits` module to each job in a worker thread, and report the results."""
        self.do(functools.partial(self._change_all, job_ids, edit, "changed"))

    def ask(self, question: str, yes: str, act: Callable[[], str], also: Also | None = None) -> None:
        """Ask a question and run `act` if the user presses the button labelled `yes`. `also` adds a third button."""
        if self.refused():
            return
        dialog = Confirm(question, yes=yes, also=also.label if also else "")

        def take(answer: bool | None) -> None:
            if answer:
                self.do(also.act if also and dialog.took_other else act)

        self._app.push_screen(dialog, take)

    def do(self, act: Callable[[], str]) -> None:
        """Run `act` in a thread, and show the sentence it returns, or why it failed or has not started.

        Every change made by the app goes through here, so read-only mode is enforced even if a screen forgets to check.
        """
        if self.refused():
            return
        begun = threading.Event()

        def run() -> None:
            begun.set()
            try:
                if outcome := act():
                    self._app.call_later(self._tell, outcome)
            except (UserError, OSError) as error:
                self._app.call_later(self._tell, sentence(error), "error")
            except Exception as error:
                self._app.call_later(self._tell, f"this failed because of a bug in sae-tui: {error!r}", "error")

        self._app.run_worker(run, thread=True, group="actions", exit_on_error=False)
        self._app.set_timer(_BEGINS_WITHIN_S, lambda: None if begun.is_set() else self._report_delay())

    def _report_delay(self) -> None:
        why = f"no new thread could start ({threading.active_count()} are running)"
        self._app.notify(f"Your last action has not started yet: {why}. Restart the app.", severity="error")

    def _tell(self, outcome: str, severity: SeverityLevel = "information") -> None:
        # A message about a setting begins with the setting's path, so it is not capitalised.
        text = outcome if _STARTS_WITH_PATH.match(outcome) else outcome[:1].upper() + outcome[1:]
        text += "" if text.endswith((".", "!", "?")) else "."
        self._app.notify(text, severity=severity, markup=False)
        self._state.watcher.poke()
