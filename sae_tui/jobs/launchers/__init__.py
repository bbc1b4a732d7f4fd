"""Launch backends: each runs the ranks of one attempt, on this machine or on a cluster."""

from __future__ import annotations

from sae_tui.jobs.launchers.base import Attempt, Beginning
from trainer.contract.settings.catalog import LAUNCH_BACKENDS


def launcher(backend: str, beginning: Beginning) -> Attempt:
    """Return the attempt object of a launch backend; it starts nothing yet."""
    attempt: Attempt = LAUNCH_BACKENDS[backend].load()(beginning)
    return attempt
