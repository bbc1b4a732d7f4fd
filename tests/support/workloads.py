"""Workloads for tests of estimates, from a job and the width of its data."""

from __future__ import annotations

from trainer.contract.planning.hardware import CPU
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sources import DataShape


def workload(job: JobConfig, d_in: int, ranks: int = 1, *, d_out: int | None = None, device: str = "cuda") -> Workload:
    """Return the job on `ranks` ordinary GPUs or CPU processes, with more than enough data."""
    return Workload(job, ranks, DataShape(d_in, d_out, 10**9), CPU if device == "cpu" else "")
