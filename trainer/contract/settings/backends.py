"""What the registry of launch backends says of a job."""

from __future__ import annotations

import pkgutil

from trainer.contract.errors import Problem
from trainer.contract.settings.catalog import LAUNCH_BACKENDS
from trainer.contract.settings.job_file import AnyJob


def check_backend(job: AnyJob) -> list[Problem]:
    """Report what is wrong with a job for its launch backend, and that several nodes are of no use on this machine."""
    check = LAUNCH_BACKENDS[job.launch.backend].check
    problems: list[Problem] = pkgutil.resolve_name(check)(job) if check else []
    if job.launch.nodes > 1 and not job.cluster:
        clusters = " or ".join(f'"{name}"' for name, entry in LAUNCH_BACKENDS.items() if entry.cluster)
        message = (
            f"{job.launch.nodes} nodes need launch.backend = {clusters}; "
            f'on "{job.launch.backend}" it runs on this machine alone'
        )
        problems.append(Problem("launch.nodes", message, "warning"))
    return problems


def cluster_of(backend: object) -> str:
    """Return what gives out the nodes for a backend, like "SLURM"; "" for this machine, and for a name of none."""
    return LAUNCH_BACKENDS[backend].cluster if isinstance(backend, str) and backend in LAUNCH_BACKENDS else ""
