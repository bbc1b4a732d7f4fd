"""Records how a job ended: in the run's files, then in the store, after which the job may be resumed or deleted."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

import msgspec

from sae_tui.jobs.ending import JobEnding, write_ending
from sae_tui.jobs.record import write_record
from sae_tui.jobs.supervisor_log import note, tolerate, tolerate_disk
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.settings.catalog import LAUNCH_BACKENDS
from trainer.contract.store.database import StoreError
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState


def conclude(
    data: DataDir, control: Control, job: Job, ending: JobEnding, release: Callable[[], object] = lambda: None
) -> Job | None:
    """Record how a job ended, and return its final row; return None if the store already has an ending.

    `release` is called just before the store is changed, to release the run's lock. Raise `UserError` if the store
    cannot be changed; in this case, the files have been written, and the call can be repeated.
    """
    paths = data.run(job.id)
    with tolerate_disk(f"writing {paths.exit_file}"):
        write_ending(paths.exit_file, ending)
    row = _row_at(control, job, ending)
    backend = LAUNCH_BACKENDS.get(job.backend)
    if job.state == JobState.QUEUED and backend and backend.cancel:
        # The job may have been submitted to the cluster with its array, before its own supervisor started.
        pkgutil.resolve_name(backend.cancel)(paths.attempt(job.attempt + 1))
    write_record(paths, row)
    release()
    if not control.transition(job.id, ending.state, **ending.fields()):
        return None
    with tolerate("recording the end"):
        level = "error" if ending.state == JobState.FAILED else "info"
        control.add_event(job.id, str(ending.state), ending.error or str(ending.state), level)
    return row


def _row_at(control: Control, job: Job, ending: JobEnding) -> Job:
    """Return the ended job's row, based on the caller's own copy if the row in the store is unreadable."""
    try:
        job = control.job(job.id)
    except StoreError:
        raise
    except UserError as error:
        note(f"{error}; the run folder contains the record")
    return msgspec.structs.replace(job, state=ending.state, waits_for=None, **ending.fields())
