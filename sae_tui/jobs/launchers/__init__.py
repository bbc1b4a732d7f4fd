"""THE REGISTRY of launch backends: `launch.backend` -> "module:function" that starts a job's supervisor."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from trainer.contract.paths import DataDir

Launcher = Callable[[DataDir, int], None]

LAUNCHERS = {
    "local": "sae_tui.jobs.launchers.local:start",
}


def launcher(backend: str) -> Launcher:
    module, _, function = LAUNCHERS[backend].partition(":")
    found: Launcher = getattr(importlib.import_module(module), function)
    return found
