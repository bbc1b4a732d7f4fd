"""Imports the modules that a rank needs for training."""

from __future__ import annotations

import gc
import importlib

_NEEDED = ("torch", "trainer.parallel.arrange", "trainer.training.loop")


def load_trainer() -> None:
    """Import torch and the trainer with garbage collection disabled because imports create almost no garbage.

    Otherwise, Python would collect garbage about a hundred times, taking a third of the 2 s of CPU time for the
    imports.
    """
    gc.disable()
    try:
        for name in _NEEDED:
            importlib.import_module(name)
    finally:
        # Exclude these objects from collections during training too.
        gc.freeze()
        gc.enable()
