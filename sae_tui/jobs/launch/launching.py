"""Launches jobs: records each job in the store and starts its supervisor."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from sae_tui.gpu import resolve
from sae_tui.jobs import detach, environment
from sae_tui.jobs.edits import as_tags
from sae_tui.jobs.launch.kinds import launch_kind
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.machine import this_machine
from sae_tui.jobs.named_python import whole
from sae_tui.jobs.queue.after import refuse_circle
from sae_tui.jobs.queue.promised import promised_by
from sae_tui.jobs.record import write_record
from sae_tui.jobs.store_access import open_control
from sae_tui.jobs.user import user_name
from trainer.contract.errors import JobFileError, UserError, errors, sentence
from trainer.contract.files import write_own
from trainer.contract.paths import DataDir, working_folder
from trainer.contract.planning.check_job import Machine, MachineGpu, check
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.settings.consent import SBATCH, Code, Consent, problems_of, refused, sets
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import dump_job, to_table
from trainer.contract.settings.promised import Promises
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState
from trainer.contract.wording import join_words

Launched = TypeVar("Launched", bound=AnyJob)
Start = Callable[[DataDir, int], None]
J = TypeVar("J", bound=AnyJob)


def launch(
    data: DataDir,
    job: AnyJob,
    placement: Placement,
    *,
    gpu_source: str,
    after: Iterable[int] = (),
    hold: bool = False,
    tags: Iterable[str] = (),
    parent: int | None = None,
    start: Start | None = None,
) -> int:
    """Record a job, start its supervisor, and return the job's id without waiting for the job.

    The job starts after the jobs in `after` have finished and, if `hold`, after it is released. If the job cannot run,
    raise `JobFileError` and write nothing. If the job cannot be recorded, for example because the disk is full, raise
    `UserError` and create no job. If the supervisor does not start, raise `UserError`; the job is then `failed`.
    """
    job = with_whole_python(job.with_paths([working_folder()]))
    after, tags = tuple(after), as_tags(tags)
    with environment.required(job):
        if problems := errors(check(job, _machine_of(data, placement, promised_by(data, after)))):
            raise JobFileError(problems)
        data.create()
        with open_control(data) as control:
            refuse_circle(control, 0, after)
            row = Job(
                name=job.name,
                user=user_name(),
                **this_machine(),
                gpu_source=gpu_source,
                held=hold,
                after=after,
                tags=tags,
                parent=parent,
                visible_devices=visible_devices(placement, gpu_source),
                **fields_of(data, job, placement, control.jobs()),
            )
            with contextlib.ExitStack() as undo:

                def prepare(row: Job) -> Job:
                    data.refuse_links(row.id)
                    undo.callback(shutil.rmtree, data.run(row.id).root, ignore_errors=True)
                    try:
                        _write_files(data, row, job)
                    except OSError as error:
                        raise UserError(f"the job cannot be recorded in {data.root}: {sentence(error)}") from None
                    return row

                job_id = control.create_job(row, above=data.last_id(), prepare=prepare)
                undo.pop_all()
            start_or_fail(data, control, job_id, start or enqueue)
            return job_id


def enqueue(data: DataDir, job_id: int) -> None:  # noqa: ARG001 - one process waits for all jobs
    """Make sure that a queue process waits for the queued jobs."""
    detach.start_queue(data)


def with_whole_python(job: Launched, otherwise: str = "") -> Launched:
    """Expand `~` in the path of a job's interpreter; if the job does not name an interpreter, use `otherwise`."""
    python = otherwise if job.launch.python is None else job.launch.python
    if not (python and job.needs_trainer):
        return job
    return job.replace("launch", python=whole(python))


def launch_all(data: DataDir, jobs: Iterable[tuple[AnyJob, Placement]], **options: Any) -> list[int]:
    """Launch jobs in sequence and return their ids; if a launch fails, raise `UserError`.

    The error lists the jobs already launched.
    """
    launched: list[int] = []
    for job, placement in jobs:
        try:
            launched.append(launch(data, job, placement, **options))
        except UserError as error:
            if not launched:
                raise
            before = join_words([f"job {job_id}" for job_id in launched])
            raise UserError(f"{job.name}: {error}; already launched: {before}") from None
    return launched


def write_files(data: DataDir, control: Control, job_id: int, job: AnyJob) -> None:
    """Write the files needed by a queued job's supervisor; if that fails, the job fails, and raise `UserError`."""

    def write(data: DataDir, job_id: int) -> None:
        data.refuse_links(job_id)
        _write_files(data, control.job(job_id), job)

    start_or_fail(data, control, job_id, write)


def _write_files(data: DataDir, row: Job, job: AnyJob) -> None:
    paths = data.run(row.id)
    paths.create()
    write_own(paths.job_file, dump_job(job))
    launch_kind(job.kind).write_files(data, row, job)
    write_record(paths, row)


def start_or_fail(data: DataDir, control: Control, job_id: int, start: Start) -> None:
    """Start a job; if that fails, record the reason in the job's row and raise `UserError`."""
    try:
        start(data, job_id)
    except (UserError, OSError) as error:
        reason = sentence(error)
        control.transition(job_id, JobState.FAILED, error=reason)
        raise UserError(f"job {job_id} could not be started: {reason}") from None


def refuse_options_of_others(distrust: str, job: AnyJob, overrides: Sequence[str] = ()) -> None:
    """Raise `JobFileError` if an untrusted job file sets sbatch options or settings that run code.

    `distrust` explains why the file is not trusted, for example because other users can write to it; for a trusted
    file, it is "".
    """
    # Check local jobs too: the options are copied into our own job file, and a later resume may use SLURM.
    table = to_table(job)
    refusals = refused(table, Consent(overrides=tuple(overrides)))
    if job.launch.sbatch_options and not sets(overrides, SBATCH):
        refusals.append(Code(SBATCH, "", ""))
    if distrust and refusals:
        raise JobFileError(problems_of(refusals, distrust))


def fields_of(data: DataDir, job: AnyJob, placement: Placement, past: Iterable[Job]) -> dict[str, Any]:
    """Return the job row columns determined by the job's settings and placement."""
    return launch_kind(job.kind).row(data, job, placement, past) | {
        "config": dump_job(job),
        "device": placement.device,
        "gpu_ids": tuple(index for index, _ in placement.gpus),
        "gpu_uuids": tuple(uuid for _, uuid in placement.gpus),
        "gpus_wanted": placement.gpus_wanted,
        "any_gpus": placement.any_gpus,
        "shares_gpus": job.launch.share,
        "distributed": placement.world_size > 1,
        "world_size": placement.world_size,
        "priority": job.launch.priority,
        "max_restarts": job.launch.max_restarts,
        "backend": job.launch.backend,
    }


def visible_devices(placement: Placement, gpu_source: str) -> str | None:
    """Return the value of the environment variable limiting the visible GPUs, such as `CUDA_VISIBLE_DEVICES`.

    Return None if the variable is not set, or if the job does not use GPUs.
    """
    vendor = VENDORS.get(placement.vendor or resolve(gpu_source))
    wants_gpus = placement.device == "cuda" or placement.gpus_wanted
    return vendor.visible_devices() if vendor and wants_gpus else None


def _machine_of(data: DataDir, placement: Placement, promises: Promises) -> Machine:
    """Return a `Machine` that has only the job's GPUs, for the job checks.

    The GPUs themselves were checked when the job was placed.
    """
    indices = range(placement.world_size) if placement.any_gpus else [index for index, _ in placement.gpus]
    gpus = tuple(MachineGpu(index, f"GPU {index}", None) for index in indices)
    return Machine(gpus, os.cpu_count() or 1, data.root, promises=promises)
