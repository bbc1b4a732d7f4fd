"""A lock file in the run folder that is held for exactly as long as a process of the run lives, even after `kill -9`.

Every process of a run holds it shared; who wants to begin one must have it alone first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from trainer.contract.problems import UserError

NAME = "run.lock"


class RunLock:
    """The lock of a run folder, taken alone; raises `UserError` where a process of a run there still lives."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._descriptor = run_dir, _open(run_dir)
        self._take(fcntl.LOCK_EX)

    def share(self) -> None:
        """Lets the ranks take it too; raises `UserError` where somebody else got it in between."""
        self._take(fcntl.LOCK_SH)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _take(self, kind: int) -> None:
        # A file system without locks cannot tell; that must not keep anybody from training.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._descriptor)
                reason = f"the run in {self._run_dir} is still going; stop it, wait until it has saved, and try again"
                raise UserError(reason) from None


def hold(run_dir: Path) -> None:
    """Marks this process, until it ends, as one of the run."""
    with contextlib.suppress(OSError):
        fcntl.flock(_open(run_dir), fcntl.LOCK_SH | fcntl.LOCK_NB)


def _open(run_dir: Path) -> int:
    return os.open(run_dir / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
