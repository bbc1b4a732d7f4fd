"""What signals ask of a supervisor, and how it ends the processes below it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from trainer.contract.process import ProcessRef, parent_of

# How long a supervisor that is told to end (a shutdown) lets its ranks save.
SAVE_S = 30.0


class Orders:
    """Records the signals to end: the first is a request to stop and save, the second does not wait any longer."""

    def __init__(self) -> None:
        self.to_end_since: float | None = None
        self.at_once = False

    def end(self) -> None:
        self.at_once = self.at_once or self.to_end_since is not None
        self.stop()

    def stop(self) -> None:
        """Record a request that may repeat, as SIGXCPU does every second."""
        self.to_end_since = self.to_end_since or time.monotonic()

    @property
    def is_overdue(self) -> bool:
        return self.to_end_since is not None and time.monotonic() - self.to_end_since > SAVE_S


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
        if entry.name.isdigit() and parent_of(int(entry.name)) == parent and (ref := ProcessRef.of(int(entry.name))):
            children.append(ref)
    return children
