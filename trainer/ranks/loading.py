"""Imports the modules that a rank needs for training, before the rank's turn if its supervisor starts it early."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path

from trainer.contract.imports import without_collection
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.runs.grant import CHANNEL, receive_grant
from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.ranks.rank import end_with_parent, hold_signals, note_parent

_NEEDED = ("torch", "trainer.parallel.arrange", "trainer.training.loop")
# The other modules that a rank imports before its first step.
_EARLY = ("trainer.ranks.training_work", "trainer.reporting.mirroring", "trainer.evaluation.at_end")


def load_trainer() -> None:
    """Import torch and the trainer."""
    with without_collection():
        for name in _NEEDED:
            importlib.import_module(name)


def wait_for_turn() -> None:
    """If this rank was started early, import torch and wait for its turn; exit the process if the turn never comes.

    If anything has changed that torch may have read, start this process again from the beginning.
    """
    if (channel := os.environ.pop(CHANNEL, None)) is None:
        return
    note_parent()
    hold_signals()
    before, installed = dict(os.environ), _installed()
    is_loaded = False
    # If the import fails, it fails again after the restart, and the error is then reported.
    with contextlib.suppress(Exception):
        load_trainer()
        with without_collection():
            for name in _EARLY:
                importlib.import_module(name)
        is_loaded = True
    if (grant := receive_grant(int(channel))) is None:
        os._exit(EXIT_FINISHED)
    # The supervisor may have died after it gave the turn. No process would then watch this rank.
    end_with_parent()
    log, *_ = grant.descriptors
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    after = grant.environment
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    is_same = is_loaded and installed == _installed() and changed <= _gpu_variables()
    if not is_same or _has_touched_gpus():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], after)
    for name in changed:
        os.environ.pop(name, None)
    os.environ.update({name: after[name] for name in changed & after.keys()})


def _installed() -> int | None:
    """Return the modification time of the folder that contains torch, which changes if a package is installed in it."""
    torch = importlib.util.find_spec("torch")
    return Path(torch.origin).parents[1].stat().st_mtime_ns if torch and torch.origin else None


def _gpu_variables() -> set[str]:
    """Return the environment variables that select GPUs; a driver reads them when it is first used."""
    return {
        name for vendor in VENDORS.values() for name in (vendor.variable, *vendor.inner_variables, *vendor.order)
    }  # fmt: skip


def _has_touched_gpus() -> bool:
    """Return whether this process has used a GPU driver, which would then see no GPUs in this process."""
    files = {file for vendor in VENDORS.values() for file in vendor.driver_files}
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/self/fd/{descriptor}") in files:
                    return True
        return "/libcuda.so" in Path("/proc/self/maps").read_text()
    return True
