"""File locks that say a GPU is in use for exactly as long as a process of its job lives.

The ranks inherit the descriptors, so that not even `kill -9` of the supervisor frees a card that is
still computing, and nothing has to be cleaned up after a crash.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path


class GpuLocks:
    """The locks of one job's GPUs: all of them or none."""

    def __init__(self, folder: Path, uuids: Iterable[str]) -> None:
        # Sorted, so that two jobs that want the same cards cannot each hold one and wait for the other.
        self._paths = [folder / f"{uuid.replace('/', '_')}.lock" for uuid in sorted(uuids)]
        self.descriptors: tuple[int, ...] = ()

    def take(self) -> bool:
        """Takes every lock, or none and returns False, without waiting; True where they are held already."""
        if self.descriptors:
            # A second descriptor of the same file would conflict with our own first one.
            return True
        taken: list[int] = []
        for path in self._paths:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            taken.append(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _close(taken)
                return False
        self.descriptors = tuple(taken)
        return True

    def release(self) -> None:
        """Lets go of this process's share; a rank that lives on still holds its own."""
        _close(self.descriptors)
        self.descriptors = ()


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
