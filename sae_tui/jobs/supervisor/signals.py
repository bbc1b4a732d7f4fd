"""Records the termination signals received by a supervisor, and kills its descendant processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from sae_tui.jobs.launchers.process_tree import is_detached
from trainer.contract.process import ProcessRef, parent_of

# How long a terminated supervisor gives its ranks to save, for example during a shutdown.
SAVE_S = 30.0


class Orders:
    """Records termination signals: the first one makes the ranks save and stop, the second one kills them."""

    def __init__(self) -> None:
        self.to_end_since: float | None = None
        self.at_once = False

    def end(self) -> None:
        self.at_once = self.at_once or self.to_end_since is not None
        self.stop()

    def stop(self) -> None:
        """Record a stop request; repeated requests, such as SIGXCPU every second, do not kill the ranks."""
        self.to_end_since = self.to_end_since or time.monotonic()

    @property
    def is_overdue(self) -> bool:
        return self.to_end_since is not None and time.monotonic() - self.to_end_since > SAVE_S


def end_descendants(timeout_s: float = 5.0) -> None:
    """Kill and reap all processes left behind by the ranks, such as data loader workers and compilers.

    Leave the supervisors of jobs launched by a command running.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        children = _children(os.getpid())
        if children and all(is_detached(ref.pid) for ref in children):
            return
        for ref in children:
            if not is_detached(ref.pid):
                ref.send(signal.SIGKILL)
        time.sleep(0.01)


def _children(parent: int) -> list[ProcessRef]:
    """Return a process's live children. When a child dies, its own children become children of the subreaper."""
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and parent_of(int(entry.name)) == parent and (ref := ProcessRef.of(int(entry.name))):
            children.append(ref)
    return children
