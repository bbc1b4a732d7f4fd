"""Handles the signals that end a supervisor, and ends its descendant processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from trainer.contract.process import ProcessRef, parent_of

# Seconds that a supervisor gives its ranks to save when it is asked to end, as at a shutdown.
SAVE_S = 30.0


class Orders:
    """Records the signals to end: the first asks the ranks to save and stop, the second ends them at once."""

    def __init__(self) -> None:
        self.to_end_since: float | None = None
        self.at_once = False

    def end(self) -> None:
        self.at_once = self.at_once or self.to_end_since is not None
        self.stop()

    def stop(self) -> None:
        """Record a stop request; a repetition, as of SIGXCPU every second, does not end the ranks at once."""
        self.to_end_since = self.to_end_since or time.monotonic()

    @property
    def is_overdue(self) -> bool:
        return self.to_end_since is not None and time.monotonic() - self.to_end_since > SAVE_S


def end_descendants(timeout_s: float = 5.0) -> None:
    """Kill and reap all processes that the ranks left behind (data loader workers, compilers)."""
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
    """Return the living children of a process; when a child dies, its own children are reparented to the subreaper."""
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and parent_of(int(entry.name)) == parent and (ref := ProcessRef.of(int(entry.name))):
            children.append(ref)
    return children
