"""Finds the activation folders that other jobs will write, for training jobs that wait for those jobs."""

from __future__ import annotations

from collections.abc import Iterable

from sae_tui.jobs.store_access import existing
from trainer.contract.errors import JobFileError, Problem
from trainer.contract.paths import DataDir
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import class_of, parse_any
from trainer.contract.settings.promised import NO_PROMISES, Promise, Promises
from trainer.contract.settings.shards import inspect_shards
from trainer.contract.settings.toml import table_of
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import DONE


def promised_by(data: DataDir, after: Iterable[int]) -> dict[str, Promise]:
    """Return a dict mapping each folder that an unfinished job in `after` will write to its promised content.

    Raise `UserError` if a job does not exist.
    """
    promises: dict[str, Promise] = {}
    for job_id in after:
        with existing(data, job_id) as control:
            job = control.job(job_id)
        if job.state not in DONE:
            promises |= _promises(job)
    return promises


def promised_by_active(jobs: Iterable[Job]) -> dict[str, Promise]:
    """Return a dict mapping each folder that a queued or running job will write to its promised content."""
    return {folder: one for job in jobs if not job.state.is_final for folder, one in _promises(job).items()}


def writers_of(job: AnyJob, jobs: Iterable[Job]) -> tuple[int, ...]:
    """Return the ids of queued and running jobs that this job must wait for because it reads folders they write."""
    folders = {folder for _, folder in job.folders_read}
    return tuple(one.id for one in jobs if not one.state.is_final and not folders.isdisjoint(_promises(one)))


def refuse_other_rows(control: Control, job: Job, config: AnyJob) -> None:
    """Raise `JobFileError` if the rows a job waited for differ from what was promised at its launch."""
    kept = {other: control.job(other) for other in job.after if control.state(other) is not None}
    for other, writer in kept.items():
        promises = _promises(writer)
        for field, folder in config.folders_read:
            if promise := promises.get(folder):
                _refuse_other(job, other, field, folder, promise)


def _refuse_other(job: Job, writer: int, field: str, folder: str, promise: Promise) -> None:
    stored = inspect_shards(folder, field)
    if promise.d_in not in (None, stored.d_in):
        message = f"rows in {folder} have {stored.d_in} values, but job {writer} promised {promise.d_in}; clone the job"
        raise JobFileError([Problem(field, message)])
    if stored.n_tokens < promise.n_tokens:
        message = f"{folder} contains {stored.n_tokens:,} rows, but job {writer} promised {promise.n_tokens:,}"
        cure = f"give that job more text, or train on these rows with `sae-tui resume {job.id}`"
        raise JobFileError([Problem(field, f"{message}; {cure}")])


def _promises(job: Job) -> Promises:
    table = table_of(job.config)
    # There may be a thousand jobs. Most do not write rows, so parse only the jobs that do.
    writer = parse_any(table)[0] if class_of(table).writes_rows else None
    return writer.promises(f"job {job.id}") if writer else NO_PROMISES
