"""Loads what a rank trains with."""

from __future__ import annotations

import gc
import importlib

_NEEDED = ("torch", "trainer.parallel.arrange", "trainer.training.loop")


def load_trainer() -> None:
    """Import torch and the trainer without looking for garbage among their objects, of which none is any.

    Python would look for it some hundred times, which took a third of the two seconds of CPU time.
    """
    gc.disable()
    try:
        for name in _NEEDED:
            importlib.import_module(name)
    finally:
        # The collections of the training need not look at these objects either.
        gc.freeze()
        gc.enable()
