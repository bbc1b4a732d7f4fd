"""Reports whether jobs that were just launched have started, or why they wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from sae_tui.jobs.states import ENDED
from trainer.contract.paths import DataDir
from trainer.contract.settings.backends import cluster_of
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import ACTIVE, JobState

# A supervisor reads the GPUs within 1 s, on a busy machine within 3 s.
KNOWN_WITHIN_S = 3.0
POLL_S = 0.1


def describe_launch(
    data: DataDir, job_ids: Sequence[int], *, is_over: Callable[[], bool] = lambda: False, but: str = ""
) -> str:
    """Return a message about the launched jobs; wait for their state for up to 3 s, or until `is_over` becomes true.

    `but` replaces the promise that the jobs keep running.
    """
    deadline = time.monotonic() + KNOWN_WITHIN_S
    with contextlib.closing(Control(data.control_db, readonly=True)) as control:
        while True:
            jobs = [control.job(job_id) for job_id in job_ids]
            if all(map(_is_known, jobs)) or time.monotonic() > deadline or is_over():
                return _sentence(jobs, but)
            time.sleep(POLL_S)


def _is_known(job: Job) -> bool:
    return job.state != JobState.QUEUED or job.held or job.waits_for is not None


def _sentence(jobs: Sequence[Job], but: str) -> str:
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
