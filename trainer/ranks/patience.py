"""How long ranks wait for each other: rank 0 may be writing what all of them hold."""

from __future__ import annotations

from trainer.contract.errors import JobFileError
from trainer.contract.planning.memory import checkpoint_bytes
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import AnyJob

LEAST_S = 600.0
# A crowded network file system.
_WRITTEN_PER_S = 50e6


def patience_s(job: AnyJob, world_size: int) -> float:
    """Return the seconds that other ranks wait for one that is busy: those of a checkpoint on a slow disk, or more."""
    if not isinstance(job, JobConfig):
        return LEAST_S
    try:
        work = Workload(job, world_size, job.data_shape())
    except JobFileError:  # The ranks will say so themselves.
        return LEAST_S
    return max(LEAST_S, checkpoint_bytes(work) / _WRITTEN_PER_S)
