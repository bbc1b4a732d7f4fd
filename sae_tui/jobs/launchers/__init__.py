"""Launch backends that run an attempt's ranks on this machine or on a cluster."""

from __future__ import annotations

import pkgutil

from sae_tui.jobs.launchers.base import Attempt, AttemptSetup, CommandAttempt
from trainer.contract.settings.catalog import LAUNCH_BACKENDS


def launcher(backend: str, setup: AttemptSetup) -> Attempt:
    """Return an attempt for this launch backend, without starting it."""
    attempt: Attempt = LAUNCH_BACKENDS[backend].load()(setup)
    return attempt


def command_launcher(backend: str, setup: AttemptSetup) -> CommandAttempt:
    """Return an attempt of a command for this launch backend, without starting it."""
    attempt: CommandAttempt = pkgutil.resolve_name(LAUNCH_BACKENDS[backend].program)(setup)
    return attempt
