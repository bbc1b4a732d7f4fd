"""Computes how long ranks wait for each other: rank 0 may be writing a checkpoint of all ranks."""

from __future__ import annotations

from trainer.contract.errors import JobFileError
from trainer.contract.planning.hardware import CPU
from trainer.contract.planning.memory import checkpoint_bytes
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import AnyJob

LEAST_S = 600.0
# Assumed write speed of a busy network file system, in bytes per second.
_WRITTEN_PER_S = 50e6


def patience_s(job: AnyJob, world_size: int) -> float:
    """Return how many seconds ranks wait for a busy rank: the time to write a checkpoint, but at least `LEAST_S`."""
    if not isinstance(job, JobConfig):
        return LEAST_S
    try:
        # A CPU keeps moments in fp32 by default: the larger checkpoint.
        work = Workload(job, world_size, job.data_shape(), CPU)
    except JobFileError:  # The ranks report this error themselves.
        return LEAST_S
    return max(LEAST_S, checkpoint_bytes(work) / _WRITTEN_PER_S)
