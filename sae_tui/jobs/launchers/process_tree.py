"""Finds and signals all of a command's processes, even if they have left its process group, session or process tree.

A supervisor or queue process that a command starts through `sae-tui` does not belong to the command, and outlives it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from sae_tui.jobs.launchers.cgroup import Cgroup
from trainer.contract.process import ProcessRef

# The environment variable that marks a command's processes; its value is the run folder.
MARK = "SAE_TUI_RUN_DIR"
# Part of the command line of a `sae-tui` background process, starting after Python's path.
_DETACHED = b"\0-P\0-m\0sae_tui.jobs."
# The minimum time between complete searches for measurements, as a number of seconds and as a multiple of a search's
# duration. A search among 80 processes takes 2 ms, and one among 5,000 takes 0.1 s.
_ALL_EVERY_S, _PAUSE = 30.0, 500


class Process(NamedTuple):
    """A process's parent and session; `image` changes when its pid is reused and when it calls `exec`."""

    parent: int
    session: int
    image: tuple[bytes, ...]


Processes = Mapping[int, Process]
_Key = tuple[int, tuple[bytes, ...]]


class ProcessTree:
    """The processes of a command whose first process, the leader, has its own session and the mark.

    `reaper` is the process that adopts the command's orphans: its supervisor, by default this process.
    """

    def __init__(self, leader: int, run_dir: Path, cgroup: Cgroup | None = None, *, reaper: int | None = None) -> None:
        self._leader, self._cgroup, self._reaper = leader, cgroup, reaper or os.getpid()
        self._mark = os.fsencode(f"{MARK}={run_dir}")
        # For `recent`: the pids that did not belong to the command at the last complete search, and the time of the
        # next one.
        self._memory = _Memory(self._mark)
        self._others: set[int] = set()
        self._search_at = 0.0

    def living(self) -> list[ProcessRef]:
        """Return the live processes, without zombies; this rereads all processes."""
        return self._refs(self._find(_read(own_pids()), _Memory(self._mark)))

    def recent(self) -> list[ProcessRef]:
        """Return the live processes for a measurement, at little cost; only one thread may call this.

        Between complete searches, only the command's own processes and new pids are read. A process that has reused
        another one's pid in the meantime is missing until the next complete search, so use `living` to end a command.
        """
        began = time.monotonic()
        if began < self._search_at:
            return self._refs(self._find(_read(own_pids(self._others)), self._memory))
        listed = {*_pids()}
        processes = _read(own_pids())
        found = {*self._find(processes, self._memory)}
        self._memory.forget_others(processes)
        self._others = listed - found - self._above(processes)
        self._search_at = began + max(_ALL_EVERY_S, _PAUSE * (time.monotonic() - began))
        return self._refs(found)

    def send(self, number: signal.Signals) -> int:
        """Send a signal to every process; return how many processes received it."""
        if number == signal.SIGKILL and self._cgroup:
            self._cgroup.kill()
        return sum(ref.send(number) for ref in self.living())

    def _refs(self, found: Iterable[int]) -> list[ProcessRef]:
        pids = {*found, *(self._cgroup.pids() if self._cgroup else ())} - {os.getpid()}
        return [ref for pid in sorted(pids) if (ref := ProcessRef.of(pid))]

    def _find(self, processes: Processes, memory: _Memory) -> Iterator[int]:
        above = self._above(processes)
        for pid, process in processes.items():
            line = (pid, *_ancestors(pid, processes))
            if self._is_below(process, line, processes) or memory.is_marked(pid, process):
                below = [one for one in line if one in processes and one not in above]
                if not any(memory.is_detached(one, processes[one]) for one in below):
                    yield pid

    def _is_below(self, process: Process, line: tuple[int, ...], processes: Processes) -> bool:
        """Return whether a process with these ancestors belongs to the command, regardless of its environment."""
        if process.session == self._leader or self._leader in line:
            return True
        # The supervisor is a subreaper, so the kernel makes it the parent of orphans.
        reaper = processes.get(self._reaper)
        return self._reaper in line[1:] and process.session != (reaper.session if reaper else 0)

    def _above(self, processes: Processes) -> set[int]:
        """Return the supervisor and all ancestors, such as the supervisor of a command that launched this one."""
        return {self._reaper, *_ancestors(self._reaper, processes), *_ancestors(self._leader, processes)}


class _Memory:
    """Remembers what was read about processes until they end or call `exec`, which may change their environment."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._marked: dict[_Key, bool] = {}
        self._detached: dict[_Key, bool] = {}

    def is_marked(self, pid: int, process: Process) -> bool:
        key = (pid, process.image)
        if key not in self._marked:
            self._marked[key] = self._mark in environ_of(pid)
        return self._marked[key]

    def is_detached(self, pid: int, process: Process) -> bool:
        key = (pid, process.image)
        if key not in self._detached:
            self._detached[key] = is_detached(pid)
        return self._detached[key]

    def forget_others(self, processes: Processes) -> None:
        """Forget everything about processes other than these."""
        kept = {(pid, process.image) for pid, process in processes.items()}
        for known in (self._marked, self._detached):
            for key in known.keys() - kept:
                del known[key]


def is_detached(pid: int) -> bool:
    """Return whether a process is a supervisor or another background process of `sae-tui`."""
    with contextlib.suppress(OSError):
        return _DETACHED in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _ancestors(pid: int, processes: Processes) -> Iterator[int]:
    seen = {pid}
    while (process := processes.get(pid)) and (pid := process.parent) and pid not in seen:
        seen.add(pid)
        yield pid


def own_pids(without: Container[int] = ()) -> Iterator[int]:
    """Yield the pids of this user's processes, or of all processes if the user is root."""
    user = os.geteuid()
    for pid in _pids():
        if pid not in without:
            with contextlib.suppress(OSError):
                if user in (0, os.stat(f"/proc/{pid}").st_uid):
                    yield pid


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _read(pids: Iterable[int]) -> dict[int, Process]:
    """Return the live processes with these pids."""
    return {pid: process for pid in pids if (process := _process(pid))}


def _process(pid: int) -> Process | None:
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        # `image` contains the start time, and the addresses of the arguments and the environment, which are random.
        return Process(int(fields[1]), int(fields[3]), (fields[19], *fields[45:49]))
    return None


def environ_of(pid: int) -> frozenset[bytes]:
    with contextlib.suppress(OSError):
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return frozenset()
