"""Notices that the package was replaced under a waiting process, as by `pip install -U`, and starts its program again.

A supervisor loads many modules only when its job starts. Those of another version would not fit the ones it has.
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
# What a supervisor loads on the way to a job's end.
_PROGRAM = "import sae_tui.jobs.supervisor.supervise, sae_tui.jobs.supervisor.attempt, sae_tui.jobs.supervisor.end_hook"
_TRY_EVERY_S, _LOAD_LIMIT_S = 5.0, 60.0


class Installed:
    """The package as it was when this object was made."""

    def __init__(self) -> None:
        self._at_start = _state()
        self._try_at = 0.0

    def is_current(self) -> bool:
        """Tell whether the files are still those of the start; takes about 4 ms."""
        return _state() == self._at_start

    def restart_if_replaced(self) -> bool:
        """Start the program of this process again where its package was replaced.

        It keeps pid, log and environment, and gives up its locks. Return False where the package was replaced but does
        not start, as halfway through an upgrade.
        """
        if self.is_current():
            return True
        if time.monotonic() >= self._try_at:
            self._try_at = time.monotonic() + _TRY_EVERY_S
            if _loads():
                os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        return False


def _state() -> int:
    # Not by a set of all entries, which would take a waiting supervisor half a MB.
    return functools.reduce(operator.xor, (hash(entry) for package in PACKAGES for entry in _files(package)))


def _files(folder: Path | str) -> Iterator[tuple[str, int, int]]:
    """Yield path, time and size of every module below a folder; of one that is just being replaced, what is there."""
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
    """Tell whether a new process can load what a supervisor needs."""
    command = [sys.executable, "-P", "-c", _PROGRAM]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=_LOAD_LIMIT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
