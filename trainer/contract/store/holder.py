"""Finds the process that blocks writes to a store: a process that hangs in a transaction blocks all others."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from trainer.contract.mounts import mount_of
from trainer.contract.printable import printable
from trainer.contract.process import state_of
from trainer.contract.trust import user_of

# The offsets of the first bytes that SQLite locks for a write, in the store itself and in its WAL's shared memory.
_IN_STORE, _IN_SHARED_MEMORY = 0x40000000, 120
_LONGEST_NAME = 60


def holder_of(path: Path) -> int | None:
    """Return the pid of another process blocking writes to this store, or None if no such process is visible.

    A process on another host, or outside this PID namespace, is not visible. This function does not open the
    store: closing it would drop this process's own locks on it.
    """
    with contextlib.suppress(OSError):
        table = Path("/proc/locks").read_bytes()
        in_wal = _locks(table, path.with_name(f"{path.name}-shm"), _IN_SHARED_MEMORY)
        in_store = _locks(table, path, _IN_STORE)
        # If there is a WAL, every process with an open connection holds a shared lock on the store, which does not
        # block writes.
        has_wal = path.with_name(f"{path.name}-wal").exists()
        in_the_way = [pid for pid, kind in (*in_wal, *in_store) if kind == b"WRITE" or not has_wal]
        return in_the_way[0] if in_the_way else None
    return None


def _locks(table: bytes, path: Path, first: int) -> list[tuple[int, bytes]]:
    """Return the pids and types of other processes' locks on a file at byte `first` or later, write locks first."""
    if not path.exists():
        return []
    place = f"{mount_of(path.parent).device}:{path.stat().st_ino}".encode()
    row = rb"^\d+: POSIX +\w+ +(READ|WRITE) +(\d{1,10}) +" + re.escape(place) + rb" (\d+) "
    found = [
        (int(pid), kind)
        for kind, pid, start in re.findall(row, table, re.MULTILINE)
        if int(pid) not in (0, os.getpid()) and int(start) >= first
    ]
    return sorted(found, key=lambda one: one[1] != b"WRITE")


def is_halted(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger."""
    return state_of(pid) in ("T", "t")


def describe_holder(pid: int) -> str:
    """Return a description of the process blocking a store, and what to do about it.

    An example is ``ann's process 123 (python -m sae_tui), which is halted; `kill -CONT 123` continues it``.
    """
    try:
        whose = user_of(os.stat(f"/proc/{pid}").st_uid)
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return f"process {pid}, which has exited; try again"
    # Omit options because their values may be secret.
    end = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    name = printable(" ".join([os.path.basename(words[0]), *words[1:end]]).strip()[:_LONGEST_NAME])
    who = f"{whose}'s process {pid}" + (f" ({name})" if name else "")
    if is_halted(pid):
        return f"{who}, which is halted; `kill -CONT {pid}` continues it"
    return f"{who}; try again, or run `kill {pid}` if it hangs, which undoes only its unfinished change"
