"""Resumes a job that has ended: starts its next attempt from its last good checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from sae_tui.jobs import environment
from sae_tui.jobs.edits import NotApplicable
from sae_tui.jobs.launch.launching import (
    NotStarted,
    Start,
    enqueue,
    fields_of,
    refuse_options_of_others,
    start_or_fail,
    visible_devices,
    with_whole_python,
    write_files,
)
from sae_tui.jobs.launch.limits import problems_with_policy
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.machine import elsewhere, is_here, this_machine
from sae_tui.jobs.output import NO_SHARD
from sae_tui.jobs.queue.after import comes_after
from sae_tui.jobs.queue.gpu_reader import GpuReader
from sae_tui.jobs.revive import reconcile_and_revive
from sae_tui.jobs.states import stands
from sae_tui.jobs.store_access import existing
from sae_tui.policy import read_policy
from trainer.contract.errors import JobFileError, Problem, UserError, errors, sentence
from trainer.contract.files import write_own
from trainer.contract.paths import DataDir, RunPaths, private_folder
from trainer.contract.planning.model_placement import refusal_of_model_gpus
from trainer.contract.planning.stored_extraction import n_stored_rows
from trainer.contract.runs.checkpoint_manifest import newest_first
from trainer.contract.runs.lock import RunLock, is_held, still_going
from trainer.contract.runs.resume import StoredRun, data_notes, length_notes, stored_job, stored_run, with_same_step
from trainer.contract.settings.catalog import KINDS
from trainer.contract.settings.consent import sets
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job import AnyJob, JobConfig
from trainer.contract.settings.job_file import any_job_of, class_of, load_any, load_as, read_toml
from trainer.contract.settings.toml import Judged, read_plain_text, table_of
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState
from trainer.contract.trust import distrust_of_file
from trainer.contract.wording import join_words

Place = Callable[[AnyJob], Placement]
# The settings that determine where a job runs and on how many ranks.
_PLACE = ("launch.gpus", "launch.backend", "launch.nodes", "data.model_gpus")


class ResumePlan(msgspec.Struct, frozen=True):
    """The plan for resuming a job: its settings, where it runs, and notes for the user."""

    config: AnyJob
    placement: Placement
    step: int
    notes: tuple[str, ...] = ()
    # The unit of `step`: "step" for a training job, "row" for an extraction job, or "attempt" for a command.
    counts: str = "step"
    # True if there is a checkpoint. Its step may be 0, as in the checkpoint of an imported SAE.
    has_checkpoint: bool = True
    # The total number of steps for a training job with a checkpoint, or None for any other job.
    total_steps: int | None = None
    # Why a job that has never run cannot start yet, like `is held until it is released`.
    waits: str = ""

    @property
    def sentence(self) -> str:
        """A predicate appended to "job 5", like `resumes from step 501`."""
        if self.counts == "row":
            begins = f"starts from the first row: {NO_SHARD}"
            return f"resumes after the {self.step:,} rows of its complete shards" if self.step else begins
        if self.waits:
            return f"is queued again; it {self.waits}"
        if self.counts == "attempt":
            return f"runs again from the start, as attempt {self.step}" if self.step > 1 else "starts"
        if not self.has_checkpoint:
            return "starts from step 0, because it has not saved a checkpoint"
        return f"resumes from step {self.step}"


def resume(
    data: DataDir,
    job_id: int,
    place: Place,
    overrides: Sequence[str] = (),
    *,
    start: Start | None = None,
    finish: bool = False,
) -> ResumePlan:
    """Put a job back in the queue; if the overrides change its devices, `place` chooses the new ones.

    If `finish`, the job starts to cool down as soon as it resumes, and then finishes.

    Raise `JobFileError` if an override would change a fixed setting, and `UserError` if the job cannot be resumed.
    If the queue process does not start, the job remains queued, and a note says so.
    """
    reconcile_and_revive(data)
    with existing(data, job_id) as control:
        job = control.job(job_id)
        if not job.state.is_final:
            raise NotApplicable(_not_ended_message(data, job))
        if is_held(data.run(job_id).lock_file):
            raise NotApplicable(still_going(data.run(job_id).root))
        plan = prepare(data, job, place, overrides)
        _refuse_gpus_of_others(data, job, plan.placement)
        if beyond := errors(problems_with_policy(plan.config, plan.placement.gpus_wanted, read_policy(data), ())):
            raise JobFileError(beyond)
        job = _with_its_place(job)
        plan = msgspec.structs.replace(plan, waits=_why_it_waits(job))
        if finish and plan.counts != "step":
            raise NotApplicable(f"job {job_id} has no training to cool down; resume it without --finish")
        with environment.required(plan.config):
            fields = fields_of(data, plan.config, plan.placement, control.jobs())
        _keep_last_word(data, job)
        fields["visible_devices"] = visible_devices(plan.placement, job.gpu_source)
        if not sets(overrides, "launch.priority"):
            # Keep the current priority, which may have been changed after the launch.
            fields["priority"] = job.priority
        if plan.total_steps:
            fields["total_steps"] = plan.total_steps
        fields |= {"restarts": 0, "held": job.held, "after": job.after}
        fields |= {"supervisor_pid": None, "supervisor_start": None}
        # Only the host that a supervisor runs on can check whether it is alive, so run it on this host.
        fields |= this_machine()
        # While this process holds the lock, the queue process cannot start the job with its former files.
        with RunLock(data.run(job_id).root):
            if not control.transition(job_id, JobState.QUEUED, **fields):
                raise UserError(f"job {job_id} was started or deleted by another process; see `sae-tui job {job_id}`")
            if finish:
                control.request(job_id, "finish")
            control.add_event(job_id, "resuming", plan.sentence)
            write_files(data, control, job_id, plan.config)
        if start:
            start_or_fail(data, control, job_id, start)
        elif reason := enqueue(data):
            plan = msgspec.structs.replace(plan, notes=(*plan.notes, str(NotStarted([job_id], reason))))
        return plan


def prepare(data: DataDir, job: Job, place: Place, overrides: Sequence[str] = ()) -> ResumePlan:
    """Check whether a job can be resumed, and return the plan for resuming it; do not change the job."""
    paths = data.run(job.id)
    data.refuse_links(job.id)
    if not paths.job_file.exists():
        _complete_launch(data, job)
    raw = read_toml(paths.job_file, read_plain_text)
    if class_of(raw) is ExtractJob:
        return _prepare_extraction(paths, job, place, overrides)
    if KINDS[class_of(raw).kind].is_program:
        return _prepare_program(paths, job, place, overrides)
    judged = Judged()
    was, config = stored_job(paths.root, []), stored_job(paths.root, overrides, judged)
    refuse_options_of_others(judged.distrust, config, overrides)
    config = with_whole_python(config)
    where = place(config) if sets(overrides, *_PLACE) else _as_before(job)
    if refusal := refusal_of_model_gpus(config, where.world_size):
        raise JobFileError([Problem("data.model_gpus", refusal)])
    if not newest_first(paths.checkpoints):
        return ResumePlan(config, where, 0, has_checkpoint=False)
    run = stored_run(paths.root)
    _refuse_finished(job, run, was, config)
    config, shared = with_same_step(was, config, run.last.n_devices, where.world_size)
    notes = (*run.notes, *length_notes(was, config, run, where.world_size), *shared, *data_notes(config, run))
    return ResumePlan(config, where, run.position.step, notes, total_steps=run.total_steps(config, where.world_size))


def _prepare_extraction(paths: RunPaths, job: Job, place: Place, overrides: Sequence[str]) -> ResumePlan:
    """Return the plan for resuming an extraction job, which continues after its last complete shard."""
    judged = Judged()
    config = load_as(ExtractJob, paths.job_file, overrides, read=judged)
    refuse_options_of_others(judged.distrust, config, overrides)
    config = with_whole_python(config)
    where = place(config) if sets(overrides, *_PLACE) else _as_before(job)
    if job.state == JobState.FINISHED:
        raise JobFileError([Problem("extract.n_tokens", f"job {job.id} has finished; clone it to extract more")])
    return ResumePlan(config, where, n_stored_rows(config), counts="row")


def _prepare_program(paths: RunPaths, job: Job, place: Place, overrides: Sequence[str]) -> ResumePlan:
    """Return the plan for running a command again, in its stored environment; only `SAE_TUI_ATTEMPT` changes."""
    judged = Judged()
    config = load_any(paths.job_file, overrides, read=judged)
    refuse_options_of_others(judged.distrust, config, overrides)
    where = place(config) if sets(overrides, *_PLACE) else _as_before(job)
    return ResumePlan(config, where, job.attempt + 1, counts="attempt")


def _complete_launch(data: DataDir, job: Job) -> None:
    """Write the job file for a job whose launch was interrupted before the file was written.

    If the job has already run, its job file was deleted later, so raise `UserError`.
    """
    if job.attempt or not job.config:
        raise UserError(f"job {job.id} cannot be resumed: its run folder was deleted; clone it")
    refuse_options_of_others(distrust_of_file(data.control_db), any_job_of(table_of(job.config)))
    paths = data.run(job.id)
    try:
        paths.create()
        write_own(paths.job_file, job.config)
    except OSError as error:
        raise UserError(f"{paths.job_file} cannot be written: {sentence(error)}") from None


def _not_ended_message(data: DataDir, job: Job) -> str:
    if why := elsewhere(data, job):
        return f"job {job.id} {stands(job)}; {why}"
    if job.state == JobState.QUEUED:
        how = "to change its settings, stop it, then resume it" if job.held else "it starts automatically"
        return f"job {job.id} {stands(job)}; {how}"
    return f"job {job.id} {stands(job)}; only a job that has ended or is paused can be resumed"


def _with_its_place(job: Job) -> Job:
    """Return the job with the values of `after` and `held` that apply when it is queued again.

    If the job has never run, both values are kept; otherwise, they are cleared. Resuming a job also releases it, so a
    job stopped by the user is no longer held.
    """
    if job.attempt:
        return msgspec.structs.replace(job, held=False, after=())
    return msgspec.structs.replace(job, held=job.held and job.state != JobState.STOPPED)


def _why_it_waits(job: Job) -> str:
    """Return a clause explaining why a queued job cannot start yet, or "" if nothing prevents it."""
    held = "is held until it is released" if job.held else ""
    return " and ".join(filter(None, (comes_after(job.after), held)))


def _refuse_gpus_of_others(data: DataDir, job: Job, placement: Placement) -> None:
    """Raise `JobFileError` if the job is pinned to GPUs on its former host that this host does not have.

    Raise `UserError` if this host's GPUs cannot be read.
    """
    named = {uuid for _, uuid in placement.gpus}
    if is_here(job) or not named or job.gpu_source == "none":
        return
    reader = GpuReader(data, job.gpu_source)
    here = {sample.uuid for sample in reader.samples()}
    if reader.problem:
        why = f"the GPUs on this host cannot be read: {reader.problem}"
        raise UserError(f"job {job.id} used GPUs on {job.host}, and {why}")
    if missing := [index for index, uuid in placement.gpus if uuid not in here]:
        gpus = f"GPU{'s' * (len(missing) > 1)} {join_words(list(map(str, missing)))}"
        message = (
            f"job {job.id} used {gpus} on {job.host}, which this host does not have; choose other GPUs with --gpus"
        )
        raise JobFileError([Problem("launch.gpus", message)])


def _refuse_finished(job: Job, run: StoredRun, was: JobConfig, now: JobConfig) -> None:
    same_length = (was.train.n_steps, was.train.n_tokens) == (now.train.n_steps, now.train.n_tokens)
    if run.is_finished(was) and same_length:
        longer = f"train it for longer with {run.longer}, or clone it"
        raise JobFileError([Problem("train.n_steps", f"job {job.id} has finished; {longer}")])


def _as_before(job: Job) -> Placement:
    """Return a job's former placement; a job that was allowed to use any GPUs may do so again."""
    device: Literal["cuda", "cpu"] = "cuda" if job.device == "cuda" else "cpu"
    gpus = () if job.any_gpus else tuple(zip(job.gpu_ids, job.gpu_uuids, strict=False))
    return Placement(device, gpus, job.world_size, any_gpus=job.any_gpus, had_bytes=job.card_memory_bytes)


def _keep_last_word(data: DataDir, job: Job) -> None:
    """Move `exit.json` from the run folder, where it marks the job as ended, to the ended attempt's folder."""
    paths = data.run(job.id)
    try:
        if paths.exit_file.exists():
            target = paths.attempt(max(1, job.attempt)) / "exit.json"
            private_folder(target.parent)
            paths.exit_file.replace(target)
    except OSError as error:
        raise UserError(f"{paths.exit_file} cannot be moved: {sentence(error)}") from None
