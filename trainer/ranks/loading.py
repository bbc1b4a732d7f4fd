"""Imports the modules that a rank needs for training."""

from __future__ import annotations

import importlib

from trainer.contract.imports import without_collection

_NEEDED = ("torch", "trainer.parallel.arrange", "trainer.training.loop")


def load_trainer() -> None:
    """Import torch and the trainer."""
    with without_collection():
        for name in _NEEDED:
            importlib.import_module(name)
