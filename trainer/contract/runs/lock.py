"""Files that are locked for exactly as long as a process lives, even after `kill -9`, and that say so to every
PID namespace of the machine, where pids do not.

Every process of a run holds `run.lock` of its folder shared; who wants to begin one must have it alone first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from trainer.contract.errors import UserError, sentence
from trainer.contract.paths import RunPaths, open_private
from trainer.contract.process import ProcessRef

# Who asks whether a lock is held has it alone for a moment.
_ASKED_S = 0.2
_LOOKS = 3


class RunLock:
    """The lock of a run folder, taken alone; raises `UserError` where a process of a run there still lives."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.descriptor = _opened(RunPaths(run_dir).lock_file)
        self._take(fcntl.LOCK_EX)

    def share(self) -> None:
        """Let the ranks take it too; raises `UserError` where somebody else got it in between."""
        self._take(fcntl.LOCK_SH)

    def release(self) -> None:
        """Let go of this process's share; a rank that lives on still holds its own."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self, kind: int) -> None:
        # A file system without locks cannot tell; that must not keep anybody from training.
        if self.descriptor < 0:
            return
        with contextlib.suppress(OSError):
            try:
                _take(self.descriptor, kind)
            except BlockingIOError:
                self.release()
                raise UserError(still_going(self._run_dir)) from None


def still_going(run_dir: Path) -> str:
    return f"the run in {run_dir} is still going; stop it, wait until it has saved, and try again"


def hold(file: Path) -> None:
    """Hold the lock, which others may hold too, until this process ends."""
    with contextlib.suppress(OSError):
        _take(open_private(file, os.O_RDWR), fcntl.LOCK_SH)


def _take(descriptor: int, kind: int) -> None:
    """Raise `BlockingIOError` where others hold it for longer than a look takes."""
    deadline = time.monotonic() + _ASKED_S
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def is_held(file: Path) -> bool | None:
    """Whether any process holds the lock, in whatever PID namespace; None where that cannot be told."""
    for _ in range(_LOOKS):
        # One that looks as well has it alone, too, and for less than a look takes.
        if not (held := _is_taken(file)):
            return held
        time.sleep(0.005)
    return True


def _is_taken(file: Path) -> bool | None:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def is_holder(process: ProcessRef, file: Path) -> bool:
    """Whether a process can be seen to share the lock: it has locked this very file, not only opened it."""
    try:
        wanted = file.lstat()
        descriptors = list(Path(f"/proc/{process.pid}/fd").iterdir())
    except OSError:
        return False
    return any(_shares(descriptor, wanted) for descriptor in descriptors)


def _shares(descriptor: Path, wanted: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        if os.path.samestat(descriptor.stat(), wanted):
            about = (descriptor.parent.with_name("fdinfo") / descriptor.name).read_text()
            # lock:  1: FLOCK  ADVISORY  READ 1234 fe:00:56 0 EOF
            return any(line.split()[2:5] == ["FLOCK", "ADVISORY", "READ"] for line in about.splitlines())
    return False


def _opened(file: Path) -> int:
    try:
        return open_private(file, os.O_RDWR)
    except PermissionError:
        # Another member's, of a version that made it for its owner alone: as where there are no locks.
        return -1
    except OSError as error:
        raise UserError(f"{file} cannot be locked: {sentence(error)}") from None
