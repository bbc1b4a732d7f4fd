"""File locks that the kernel holds for exactly as long as a process lives, even after `kill -9`.

Unlike pids they are seen from every PID namespace of the machine. Every process of a run holds `run.lock` of its folder
shared; whoever wants to begin a run must first hold it exclusively.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from trainer.contract.errors import UserError, sentence
from trainer.contract.locks import try_lock
from trainer.contract.paths import RunPaths, open_below, open_private
from trainer.contract.process import ProcessRef

# Seconds. Testing whether a lock is held takes it exclusively for a moment, so others try again for so long.
_ASKED_S = 0.2
_LOOKS = 3


class RunLock:
    """An exclusive lock on a run folder; raises `UserError` where a process of a run there still lives."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.descriptor = _open(RunPaths(run_dir).lock_file)
        self._take(shared=False)

    def share(self) -> None:
        """Make the lock shared, so that ranks can take it too; raise `UserError` if somebody got it in between."""
        self._take(shared=True)

    def release(self) -> None:
        """Release this process's lock; a rank that lives on still holds its own."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self, *, shared: bool) -> None:
        # A file system without locks must not keep anybody from training.
        if self.descriptor < 0:
            return
        with contextlib.suppress(OSError):
            if not _take(self.descriptor, shared=shared):
                self.release()
                raise UserError(still_going(self._run_dir))


def still_going(run_dir: Path) -> str:
    return f"the run in {run_dir} is still going; stop it, wait until it has saved, and try again"


def hold(file: Path) -> None:
    """Hold the lock, shared with others, until this process ends; ignore a file system without locks."""
    with contextlib.suppress(OSError):
        _take(open_private(file, os.O_RDWR), shared=True)


def _take(descriptor: int, *, shared: bool) -> bool:
    """Lock a file; return False where others hold it for longer than testing it takes."""
    deadline = time.monotonic() + _ASKED_S
    while not try_lock(descriptor, shared=shared):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_held(file: Path) -> bool | None:
    """Tell whether any process holds the lock, in whatever PID namespace; return None where that cannot be known."""
    for _ in range(_LOOKS):
        # Another process that is testing it holds it exclusively, too, but only for a moment.
        if not (held := _is_taken(file)):
            return held
        time.sleep(0.005)
    return True


def _is_taken(file: Path) -> bool | None:
    try:
        descriptor = open_below(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        return not try_lock(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def is_holder(process: ProcessRef, file: Path) -> bool:
    """Tell whether a process can be seen to hold the shared lock: it has locked this very file, not only opened it."""
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


def _open(file: Path) -> int:
    try:
        return open_private(file, os.O_RDWR)
    except PermissionError:
        # Another group member's file, made by a version that made it 0600: go on as where there are no locks.
        return -1
    except OSError as error:
        raise UserError(f"{file} cannot be locked: {sentence(error)}") from None
