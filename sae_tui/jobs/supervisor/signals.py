"""What signals ask of a supervisor, and how it ends the processes below it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

from trainer.contract.process import ProcessRef

# How long a supervisor that is told to end (a shutdown) lets its ranks save.
SAVE_S = 30.0
_PR_SET_CHILD_SUBREAPER = 36


class Orders:
    """Records the signals to end: the first is a request to stop and save, the second does not wait any longer."""

    def __init__(self) -> None:
        self.to_end_since: float | None = None
        self.at_once = False

    def end(self) -> None:
        self.at_once = self.at_once or self.to_end_since is not None
        self.to_end_since = self.to_end_since or time.monotonic()

    @property
    def is_overdue(self) -> bool:
        return self.to_end_since is not None and time.monotonic() - self.to_end_since > SAVE_S


def become_subreaper() -> None:
    """Make orphans among our descendants our children, so that they can be found and ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(timeout_s: float = 5.0) -> None:
    """Kill and reap whatever the ranks left behind (data loader workers, compilers)."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for ref in _children(os.getpid()):
            ref.send(signal.SIGKILL)
        time.sleep(0.01)


def _children(parent: int) -> list[ProcessRef]:
    """Return the living children of a process; as they die, their own children become those of the subreaper."""
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent_pid(entry) == parent and (ref := ProcessRef.of(int(entry.name))):
            children.append(ref)
    return children


def _parent_pid(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return None
