"""What a process asks of the kernel about its family: not to outlive its parent, and to get its orphans."""

from __future__ import annotations

import ctypes
import os
import signal

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
# Opened now, since a child may ask between fork and exec, where nothing may be loaded any more.
_libc = ctypes.CDLL(None)


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when its parent dies; exit at once with 1 if it just has.

    `parent` is its pid as it was known before, since a process whose parent died gets another one.
    """
    _libc.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Make orphans among our descendants our children, so that they can be found and ended."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
