"""File locks for runs; the kernel releases a lock when the process holding it exits, even after `kill -9`.

Unlike pids, file locks are valid in all PID namespaces of a machine. Every process in a run holds a shared lock on
`run.lock` in the run folder. A process that starts a run must first lock this file exclusively.
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

# How long to keep trying to lock a file, in seconds, because another process may hold the lock briefly to test it.
_ASKED_S = 0.2
_LOOKS = 3


class RunLock:
    """An exclusive lock on a run folder; raises `UserError` if any process in the run is still alive."""

    def __init__(self, run_dir: Path, *, shared: bool = False) -> None:
        """Acquire the lock; with `shared`, join the processes of a run, which must already be running."""
        self._run_dir = run_dir
        self.descriptor = _open(RunPaths(run_dir).lock_file)
        self._take(shared=shared)

    def share(self) -> None:
        """Make the lock shared, so that ranks can acquire it too.

        Raise `UserError` if another process acquires the lock first.
        """
        self._take(shared=True)

    def release(self) -> None:
        """Release this process's lock; surviving ranks keep their locks."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self, *, shared: bool) -> None:
        # Training must also work on a file system without locks.
        if self.descriptor < 0:
            return
        with contextlib.suppress(OSError):
            if not _take(self.descriptor, shared=shared):
                self.release()
                raise UserError(still_going(self._run_dir))


def still_going(run_dir: Path) -> str:
    return f"the run in {run_dir} is still running; stop it, wait until it has saved a checkpoint, and try again"


def hold(file: Path) -> None:
    """Hold a shared lock on a file until this process exits; do nothing if the file system does not support locks."""
    with contextlib.suppress(OSError):
        _take(open_private(file, os.O_RDWR), shared=True)


def _take(descriptor: int, *, shared: bool) -> bool:
    """Lock a file; return False if another process holds the lock for longer than a lock test takes."""
    deadline = time.monotonic() + _ASKED_S
    while not try_lock(descriptor, shared=shared):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_held(file: Path) -> bool | None:
    """Return whether a process in any PID namespace holds a lock on the file, or None if unknown."""
    for _ in range(_LOOKS):
        # Check again: another process testing the lock may be holding it briefly.
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
    """Return whether, according to /proc, a process holds the shared lock on a file rather than just having it open."""
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
            # A line in the fdinfo file looks like `lock: 1: FLOCK ADVISORY READ 1234 fe:00:56 0 EOF`.
            return any(line.split()[2:5] == ["FLOCK", "ADVISORY", "READ"] for line in about.splitlines())
    return False


def _open(file: Path) -> int:
    try:
        return open_private(file, os.O_RDWR)
    except PermissionError:
        # Another member of the group created the file with mode 0600, using an older version; continue without a lock.
        return -1
    except OSError as error:
        raise UserError(f"{file} cannot be locked: {sentence(error)}") from None
