"""Launch backends that run an attempt's ranks on this machine or on a cluster."""

from __future__ import annotations

from sae_tui.jobs.launchers.base import Attempt, AttemptSetup
from trainer.contract.settings.catalog import LAUNCH_BACKENDS


def launcher(backend: str, setup: AttemptSetup) -> Attempt:
    """Return an attempt for this launch backend, without starting it."""
    attempt: Attempt = LAUNCH_BACKENDS[backend].load()(setup)
    return attempt
