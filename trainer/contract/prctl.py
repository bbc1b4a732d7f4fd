"""Kernel calls that Python lacks: end with the parent process, adopt orphans, and rename without replacing."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from pathlib import Path

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_FROM_WORKING_FOLDER, _NO_REPLACE = -100, 1
# Loaded at import: `end_with_parent` may run between fork and exec, when no library may be loaded.
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int) -> None:
    """Make the kernel send SIGTERM to this process when its parent dies; exit at once with 1 if it has already died.

    `parent` is the parent's original pid; a process whose parent has died gets a new parent.
    """
    _libc.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Make this process the parent of its orphaned descendants, so that it can find and end them."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def rename_if_new(source: Path, target: Path) -> bool:
    """Rename a file unless its target exists; return False if the file system cannot do this atomically."""
    rename = getattr(_libc, "renameat2", None)
    if rename is None:
        return False
    folder = _FROM_WORKING_FOLDER
    if rename(folder, os.fsencode(source), folder, os.fsencode(target), _NO_REPLACE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    if number != errno.EEXIST:
        raise OSError(number, os.strerror(number), str(target))
    return True
