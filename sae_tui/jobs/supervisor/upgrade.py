"""Restarts a queue process or a supervisor if its package has been replaced, for example by `pip install -U`.

Both load some modules only when they need them. Modules from a new version would not match the modules that are already
loaded.
"""

from __future__ import annotations

import functools
import operator
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import trainer

PACKAGES = (Path(__file__).parents[2], Path(trainer.__file__).parent)
# A program that imports the modules that a supervisor or the queue process loads late.
_PROGRAM = "import sae_tui.jobs.queue_process, sae_tui.jobs.supervisor.program, sae_tui.jobs.supervisor.supervise"
_TRY_EVERY_S, _LOAD_LIMIT_S = 5.0, 60.0
# An upgrade takes less time than this; a package that cannot be loaded for this long is regarded as removed.
REMOVED_AFTER_S = 120.0


class Installed:
    """Detects whether the installed package has changed since this object was created."""

    def __init__(self) -> None:
        self._at_start = _state()
        self._try_at = 0.0
        self._refused_since: float | None = None

    def is_current(self) -> bool:
        """Return whether the package files are unchanged; this takes about 4 ms."""
        return _state() == self._at_start

    def restart_if_replaced(self) -> bool:
        """Re-execute this program if its package has been replaced; otherwise, return True.

        The new program keeps the log and the environment, but not the locks. Return False if the package has been
        replaced but cannot be loaded, as in the middle of an upgrade.
        """
        if self.is_current():
            return True
        if time.monotonic() >= self._try_at:
            self._try_at = time.monotonic() + _TRY_EVERY_S
            if _loads():
                os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        return False

    def may_end(self) -> bool:
        """Do the same as `restart_if_replaced`, but also return True if the package has been removed permanently."""
        if self.restart_if_replaced():
            return True
        self._refused_since = self._refused_since or time.monotonic()
        return time.monotonic() - self._refused_since > REMOVED_AFTER_S


def _state() -> int:
    # A set of all entries would use 0.5 MB in the queue process, so combine the entries into one hash.
    return functools.reduce(operator.xor, (hash(entry) for package in PACKAGES for entry in _files(package)))


def _files(folder: Path | str) -> Iterator[tuple[str, int, int]]:
    """Yield the path, modification time and size of each module under a folder.

    If a folder cannot be read, yield its own path with zeros.
    """
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    status = entry.stat()
                    yield entry.path, status.st_mtime_ns, status.st_size
                elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
                    yield from _files(entry.path)
    except OSError:
        yield str(folder), 0, 0


def _loads() -> bool:
    """Return whether a new process can load all modules needed by a supervisor."""
    command = [sys.executable, "-P", "-c", _PROGRAM]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=_LOAD_LIMIT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
