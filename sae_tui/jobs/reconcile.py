"""Finds jobs whose supervisor died without recording how the job ended, for example after `kill -9` or a reboot."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable

from sae_tui.jobs import going
from sae_tui.jobs.machine import is_here
from sae_tui.jobs.user import user_name
from trainer.contract.paths import DataDir
from trainer.contract.runs.lock import is_held
from trainer.contract.store.database import StoreMissing
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

# A job without a recorded supervisor is regarded as orphaned after this time, which is enough even for a slow launch.
UNSUPERVISED_S = 30.0


def reconcile(data: DataDir, revive: Callable[[DataDir], object] | None = None) -> list[int]:
    """Correct the rows of jobs whose supervisor has exited; return the ids of the jobs whose state has changed.

    Queued jobs remain queued; if one of them has no supervisor, `revive` is called. A call is fast if no row needs to
    be corrected.
    """
    try:
        reader = Control(data.control_db, readonly=True)
    except StoreMissing:
        return []
    # Checking a held lock takes 15 ms, which is too long to do for each of many queued jobs.
    has_queue = functools.cache(functools.partial(_has_queue, data))
    try:
        orphaned = [job for job in reader.active_jobs() if _is_orphaned(data, job, has_queue)]
    finally:
        reader.close()
    cut_off = going.left_behind(data)
    if not (orphaned or cut_off):
        return []
    # Import late: most calls find nothing to correct, and importing the settings takes a quarter of a command's
    # start-up time.
    from sae_tui.jobs import mending
    from sae_tui.jobs.output import kind_of

    queued = [job for job in orphaned if _can_go_on(data, job)]
    unattended = [job for job in orphaned if job in queued or kind_of(job.config).is_program]
    if revive and any(_is_mine(data, job) and not has_queue(job.host, job.user) for job in unattended):
        revive(data)
    orphaned = [job for job in orphaned if job not in queued]
    if not (orphaned or cut_off):
        return []
    control = Control(data.control_db)
    try:
        for job_id in cut_off:
            mending.record_cut_off(data, control, job_id)
        return [job.id for job in orphaned if mending.mend(data, control, job)]
    finally:
        control.close()


def is_supervised(data: DataDir, job: Job) -> bool:
    """Return whether a job's supervisor is alive or, in another PID namespace, whether the run may be locked."""
    supervisor = job.supervisor
    if supervisor is None:
        return False
    return supervisor.is_alive() or (supervisor.is_elsewhere and is_held(data.run(job.id).lock_file) is not False)


def is_attended(data: DataDir, job: Job) -> bool:
    """Return whether the queue process of a job's user is alive on this machine."""
    return _has_queue(data, job.host, job.user)


def _has_queue(data: DataDir, host: str, user: str) -> bool:
    return is_held(data.queue_lock(host, user)) is not False


def waits_here(data: DataDir, job: Job) -> bool:
    """Return whether this user's queue process must start a job: one queued on this machine that has no supervisor."""
    return _can_go_on(data, job) and is_here(job) and _is_mine(data, job) and not is_supervised(data, job)


def _is_mine(data: DataDir, job: Job) -> bool:
    """Return whether this user owns a job. A command must not run a job owned by another member of the user's group."""
    with contextlib.suppress(OSError):
        return job.user == user_name() and os.stat(data.run(job.id).root).st_uid == os.geteuid()
    return False


def _can_go_on(data: DataDir, job: Job) -> bool:
    """Return whether a new supervisor can take over a job: it must be queued, with a job file and without an exit file.

    Return True if the files cannot be accessed.
    """
    paths = data.run(job.id)
    try:
        return job.state == JobState.QUEUED and paths.job_file.exists() and not paths.exit_file.exists()
    except PermissionError:
        return True


def _is_orphaned(data: DataDir, job: Job, has_queue: Callable[[str, str], bool]) -> bool:
    """Return whether a job's supervisor has exited; `has_queue` says whether a user has a queue process on a host.

    Return False if the job is on another machine, or if its supervisor may still be starting.
    """
    if not is_here(job):
        return False
    if job.state == JobState.QUEUED and _can_go_on(data, job):
        return not (is_supervised(data, job) or has_queue(job.host, job.user))
    if job.supervisor is None:
        # A resumed job was created long ago, so use the time at which it was queued.
        # The absolute value limits the wait if the clock is set back.
        return abs(time.time() - (job.queued or job.created)) > UNSUPERVISED_S
    return not is_supervised(data, job)
