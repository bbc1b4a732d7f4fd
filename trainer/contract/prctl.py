"""System calls that Python lacks: dying with the parent process, adopting orphans, and renaming without replacing."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from pathlib import Path

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_FROM_WORKING_FOLDER, _NO_REPLACE = -100, 1
# Load the C library at import: `end_with_parent` may run between fork and exec, when loading is unsafe.
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when its parent dies; exit with code 1 if it has already died.

    `parent` is the original parent's pid. If that parent has died, this process already has a different one.
    """
    _libc.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Make this process the parent of its orphaned descendants, so that it can find and terminate them."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def rename_if_new(source: Path, target: Path) -> bool:
    """Rename a file unless the target exists; return False if the file system does not support this atomically."""
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
