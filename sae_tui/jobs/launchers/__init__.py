"""Launch backends: each runs the ranks of one attempt, on this machine or on a cluster."""

from __future__ import annotations

from sae_tui.jobs.launchers.base import Attempt, AttemptSetup
from trainer.contract.settings.catalog import LAUNCH_BACKENDS


def launcher(backend: str, setup: AttemptSetup) -> Attempt:
    """Return the attempt object of a launch backend; it starts nothing yet."""
    attempt: Attempt = LAUNCH_BACKENDS[backend].load()(setup)
    return attempt
