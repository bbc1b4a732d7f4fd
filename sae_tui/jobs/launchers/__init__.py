"""THE REGISTRY of launch backends: `launch.backend` -> "module:function" that starts a job's supervisor.

A supervisor runs on this machine under either of them; what it starts as ranks is another matter: `attempt`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from sae_tui.jobs.launchers.base import Attempt
from trainer.contract.job import JobConfig
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.ranks import RankSpec

Launcher = Callable[[DataDir, int], None]

LAUNCHERS = {
    "local": "sae_tui.jobs.launchers.local:start",
    "slurm": "sae_tui.jobs.launchers.local:start",
}


def launcher(backend: str) -> Launcher:
    module, _, function = LAUNCHERS[backend].partition(":")
    found: Launcher = getattr(importlib.import_module(module), function)
    return found


def attempt(paths: RunPaths, spec: RankSpec, job: JobConfig) -> Attempt[Any]:
    """The ranks of one attempt, not yet started, on this machine or on nodes of SLURM."""
    if job.by_slurm:
        from sae_tui.jobs.launchers.slurm import SlurmAttempt

        return SlurmAttempt(paths, spec, job)
    from sae_tui.jobs.ranks import RankGroup

    return RankGroup(paths, spec)
