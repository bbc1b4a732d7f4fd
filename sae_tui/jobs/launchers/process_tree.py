"""Finds and signals all processes of a command, even if they have left its process group, session or parent.

A supervisor or a queue that a command started with `sae-tui` does not belong to the command, and outlives it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from sae_tui.jobs.launchers.cgroup import Cgroup
from trainer.contract.process import ProcessRef

# The environment variable that marks the processes of a command; its value is the run folder.
MARK = "SAE_TUI_RUN_DIR"
# The command line of a background process of `sae-tui`, from the argument after Python's path.
_DETACHED = b"\0-P\0-m\0sae_tui.jobs."


class ProcessTree:
    """The processes of a command whose first process, the leader, has its own session and the mark.

    `reaper` is the process that adopts the command's orphans: its supervisor, by default this process.
    """

    def __init__(self, leader: int, run_dir: Path, cgroup: Cgroup | None = None, *, reaper: int | None = None) -> None:
        self._leader, self._cgroup, self._reaper = leader, cgroup, reaper or os.getpid()
        self._mark = os.fsencode(f"{MARK}={run_dir}")

    def living(self) -> list[ProcessRef]:
        """Return the live processes, without zombies."""
        pids = {*self._find(), *(self._cgroup.pids() if self._cgroup else ())} - {os.getpid()}
        return [ref for pid in sorted(pids) if (ref := ProcessRef.of(pid))]

    def send(self, number: signal.Signals) -> int:
        """Send a signal to every process; return how many processes received it."""
        if number == signal.SIGKILL and self._cgroup:
            self._cgroup.kill()
        return sum(ref.send(number) for ref in self.living())

    def _find(self) -> Iterator[int]:
        stats = {pid: stat for pid in own_pids() if (stat := _parent_and_session(pid))}
        parents = {pid: parent for pid, (parent, _) in stats.items()}
        us, own_session = self._reaper, stats.get(self._reaper, (0, 0))[1]
        environs = {pid: environ_of(pid) for pid in stats}
        detached = {pid for pid in stats if pid != us and is_detached(pid)}
        for pid, (_, session) in stats.items():
            ancestors = list(_ancestors(pid, parents))
            if detached & {pid, *ancestors}:
                continue
            # The supervisor is a subreaper, so the kernel makes it the parent of orphans.
            is_orphan = us in ancestors and session != own_session
            is_marked = self._mark in environs[pid]
            if pid == self._leader or session == self._leader or self._leader in ancestors or is_orphan or is_marked:
                yield pid


def is_detached(pid: int) -> bool:
    """Return whether a process is a supervisor or another background process of `sae-tui`."""
    with contextlib.suppress(OSError):
        return _DETACHED in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    seen = {pid}
    while (pid := parents.get(pid, 0)) and pid not in seen:
        seen.add(pid)
        yield pid


def own_pids() -> Iterator[int]:
    user = os.geteuid()
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and user in (0, entry.stat().st_uid):
                yield int(entry.name)


def _parent_and_session(pid: int) -> tuple[int, int] | None:
    """Return a process's parent and session, or None if it has exited."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[1]), int(fields[3])
    return None


def environ_of(pid: int) -> frozenset[bytes]:
    with contextlib.suppress(OSError):
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return frozenset()
