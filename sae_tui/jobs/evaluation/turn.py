"""Decides when an evaluation gets a GPU: once one is free, and after the jobs that queued before it."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

from sae_tui.jobs.evaluation.request import ReservedGpu, idle_gpu
from sae_tui.jobs.gpus.availability import choices, holders, with_other_users
from sae_tui.jobs.gpus.locks import lock_folder
from sae_tui.jobs.queue.gpu_reader import GpuReader
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState


def free_gpu(data: DataDir, job_id: int, source: str, since: float) -> tuple[ReservedGpu | None, str]:
    """Return the free GPU with the most memory, or None and the reason to wait."""
    try:
        with contextlib.closing(Control(data.control_db, readonly=True)) as control:
            job, jobs, leases = control.job(job_id), control.active_jobs(), control.leases()
            ranks = [rank for lease in leases for rank in control.ranks(lease.job_id)]
    except UserError as error:
        return None, str(error)
    if before := [one for one in jobs if _is_before(one, job.host, since)]:
        return None, f"job {before[-1].id} queued before it"
    reader = _reader(data.root, source)
    samples = reader.samples()
    if not samples and reader.problem:
        return None, f"the GPUs cannot be read: {reader.problem}"
    held = with_other_users(holders(jobs, leases, ranks), lock_folder(data, source), samples)
    gpu = idle_gpu(data, job, choices(samples, held), source)
    return gpu, "" if gpu else "no GPU is free"


@functools.cache
def _reader(root: Path, source: str) -> GpuReader:
    """Return the only reader of a source; it remembers how long another process has blocked it."""
    return GpuReader(DataDir(root), source)


def _is_before(job: Job, host: str, since: float) -> bool:
    """Return whether a job on this host wants GPUs and has queued for longer."""
    waits = job.state == JobState.QUEUED and not job.held and not job.after and job.gpus_wanted > 0
    return waits and job.host == host and (job.queued or job.created) < since
