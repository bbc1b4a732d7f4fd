"""THE REGISTRY of launch backends: `launch.backend` -> "module:class" that runs the ranks of one attempt."""

from __future__ import annotations

import importlib

from sae_tui.jobs.launchers.base import Attempt, Beginning

LAUNCHERS = {
    "local": "sae_tui.jobs.launchers.local:RankGroup",
    "slurm": "sae_tui.jobs.launchers.slurm:SlurmAttempt",
}


def launcher(backend: str, beginning: Beginning) -> Attempt:
    """Return the ranks of an attempt that is about to begin; nothing is started yet."""
    module, _, name = LAUNCHERS[backend].partition(":")
    attempt: Attempt = getattr(importlib.import_module(module), name)(beginning)
    return attempt
