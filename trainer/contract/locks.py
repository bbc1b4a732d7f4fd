"""File locks; the kernel releases a lock when the last process holding it exits, even after `kill -9`."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from trainer.contract.errors import UserError
from trainer.contract.paths import open_private, private_folder


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file, exclusively or shared, without waiting; return False if another process holds the lock.

    If this process already holds a lock through this descriptor, convert it to the requested type. Raise `OSError` if
    the file system does not support locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock an SAE's folder, so that only one process at a time can change the files that describe the SAE."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Continue without a lock if the file system does not support locks.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class FileLock:
    """An exclusive lock on a dedicated file, used to elect one of several processes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> bool:
        """Acquire the lock if this process does not hold it yet; return False if another process holds it.

        Raise `UserError` if locks do not work on this file system.
        """
        if self._descriptor is not None:
            return True
        private_folder(self._path.parent)
        try:
            descriptor = open_private(self._path, 0)
        except OSError as error:
            raise UserError(f"the lock {self._path} cannot be opened: {error.strerror}") from None
        try:
            is_taken = try_lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise UserError(f"the lock {self._path} cannot be acquired: {error.strerror}") from None
        if not is_taken:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
