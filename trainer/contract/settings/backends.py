"""Checks a job against the registry of launch backends."""

from __future__ import annotations

import pkgutil

from trainer.contract.errors import Problem
from trainer.contract.settings.catalog import LAUNCH_BACKENDS
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.typed import parse_time_limit


def check_backend(job: AnyJob) -> list[Problem]:
    """Return a job's problems with its launch backend; warn if a job on this machine requests several nodes."""
    check = LAUNCH_BACKENDS[job.launch.backend].check
    problems: list[Problem] = pkgutil.resolve_name(check)(job) if check else []
    try:
        parse_time_limit(job.launch.time_limit or "1")
    except ValueError as error:
        problems.append(Problem("launch.time_limit", str(error)))
    if job.launch.nodes > 1 and not job.cluster:
        clusters = " or ".join(f'"{name}"' for name, entry in LAUNCH_BACKENDS.items() if entry.cluster)
        message = (
            f'{job.launch.nodes} nodes need launch.backend = {clusters}; "{job.launch.backend}" uses only this machine'
        )
        problems.append(Problem("launch.nodes", message, "warning"))
    return problems


def cluster_of(backend: object) -> str:
    """Return a backend's cluster scheduler, such as "SLURM"; "" for this machine or an unknown backend."""
    return LAUNCH_BACKENDS[backend].cluster if isinstance(backend, str) and backend in LAUNCH_BACKENDS else ""
