"""Launch backends: each runs the ranks of one attempt, on this machine or on a cluster."""

from __future__ import annotations

from sae_tui.jobs.launchers.base import Attempt, Beginning
from trainer.contract.settings.catalog import LAUNCH_BACKENDS


def launcher(backend: str, beginning: Beginning) -> Attempt:
    """Return the ranks of an attempt that is about to begin; nothing is started yet."""
    attempt: Attempt = LAUNCH_BACKENDS[backend].load()(beginning)
    return attempt
