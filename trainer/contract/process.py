"""Identifies processes. Pids are reused, so the same pid may later refer to another process."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import msgspec

# A pid in the range that system calls accept.
Pid = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

# No process has this many ancestors; without a limit, a parent that exits between two reads could cause an endless
# loop.
_MOST_ANCESTORS = 32
# The inode number of Linux's initial PID namespace, which is outside all containers (PROC_PID_INIT_INO).
_FIRST_NAMESPACE = 0xEFFFFFFC


class ProcessRef(msgspec.Struct, frozen=True):
    """A process, identified by its pid, its start time in clock ticks since boot, and its boot and PID namespace."""

    pid: Pid
    start_ticks: Annotated[int, msgspec.Meta(ge=0)]
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessRef | None:
        """Return the process that currently has this pid, or None if no process has it or the process is a zombie."""
        start = _start_ticks(pid)
        return None if start is None else cls(pid, start, boot_id())

    @classmethod
    def current(cls) -> ProcessRef:
        process = cls.of(os.getpid())
        assert process is not None
        return process

    @property
    def age_s(self) -> float:
        """The seconds since the process started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.start_ticks / os.sysconf("SC_CLK_TCK")

    def is_alive(self) -> bool:
        """Return whether this process is known to be alive; False for a process in another PID namespace."""
        return self.boot_id == boot_id() and _start_ticks(self.pid) == self.start_ticks

    @property
    def is_gone(self) -> bool:
        """Whether the process has definitely exited; False for a process that is not visible here."""
        return self.boot_id == boot_id() and not self.is_alive()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the process belongs to another PID namespace on this machine, such as a container's."""
        return is_of_this_boot(self.boot_id) and self.boot_id != boot_id()

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to exactly this process; return False if it is gone.

        The pidfd is opened before the process is identified, so a different process that reuses the pid is never
        signalled.
        """
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(pidfd, number)
            return True
        except OSError:
            return False
        finally:
            os.close(pidfd)


# Signals that request a checkpoint and a stop: SIGTERM, and the signals that schedulers send before they kill a job.
# The latter are SIGUSR1 and SIGUSR2 (`#SBATCH --signal`, Grid Engine, LSF), and SIGXCPU, which is sent every second
# once the CPU time limit is exceeded.
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU})


def take_back_signals() -> None:
    """Reset inherited signal dispositions and masks because some daemons and containers change them.

    If SIGCHLD is ignored, the kernel reaps child processes, and they all seem to exit with code 0. If SIGTERM is
    blocked, ranks cannot be stopped.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, *STOP_SIGNALS})


@functools.cache
def boot_id() -> str:
    """Return an id for this boot and PID namespace; pids can be compared only if these ids are equal."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return _boot()
    # Outside containers, return the plain boot id, as earlier versions did, so that ids in databases stay valid.
    return _boot() if namespace == _FIRST_NAMESPACE else f"{_boot()}/{namespace}"


@functools.cache
def machine_id() -> str:
    """Return this Linux installation's id (the same across restarts), or "" if it is missing.

    The result is also "" in a container because all containers from one image share the image's machine id.
    """
    if in_container():
        return ""
    for file in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError, ValueError):
            if text := Path(file).read_text(encoding="ascii").strip():
                return text[:64]
    return ""


def in_container() -> bool:
    """Return whether this process is in a container, where pids differ from those on the host."""
    return "/" in boot_id()


def is_of_this_boot(boot_id: str) -> bool:
    return boot_id.partition("/")[0] == _boot()


@functools.cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def state_of(pid: int) -> str:
    """Return a process's state letter, such as "T" for stopped, or "" if there is no such process."""
    fields = _stat_fields(pid)
    return fields[0].decode() if fields else ""


def parent_of(pid: int) -> int | None:
    """Return the pid of a process's parent, or None if there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else None


def ancestors_of(pid: int) -> tuple[int, ...]:
    """Return the pids of a process's parent, grandparent and so on, except pid 1; () if there is no such process."""
    found: list[int] = []
    while len(found) < _MOST_ANCESTORS and (pid := parent_of(pid) or 0) > 1:
        found.append(pid)
    return tuple(found)


def _start_ticks(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in (b"Z", b"X") else None


def _stat_fields(pid: int) -> list[bytes]:
    """Return the fields of `/proc/<pid>/stat`, starting with the process's state; [] if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    # The command name may contain spaces and parentheses, so split only the text after the last parenthesis.
    return stat.rpartition(b")")[2].split()
