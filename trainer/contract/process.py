"""Which process: a pid alone may belong to a stranger after a restart or a wrap-around."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Annotated

import msgspec

# What the kernel can give: of a larger number nothing can be asked.
Pid = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

# The first PID namespace of a Linux, outside of all containers (PROC_PID_INIT_INO).
_FIRST_NAMESPACE = 0xEFFFFFFC


class ProcessRef(msgspec.Struct, frozen=True):
    """A process by pid, start time in clock ticks since boot, and where that pid is its own: `boot_id`."""

    pid: Pid
    start_ticks: Annotated[int, msgspec.Meta(ge=0)]
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessRef | None:
        """The process that has this pid now, or None where there is none (a zombie counts as none)."""
        start = _start_ticks(pid)
        return None if start is None else cls(pid, start, boot_id())

    @classmethod
    def current(cls) -> ProcessRef:
        found = cls.of(os.getpid())
        assert found is not None
        return found

    def is_alive(self) -> bool:
        """Whether it can be seen to live; of one that `is_elsewhere` nothing can be seen."""
        return self.boot_id == boot_id() and _start_ticks(self.pid) == self.start_ticks

    @property
    def is_elsewhere(self) -> bool:
        """Whether its pid is one of another PID namespace (a container) of this machine."""
        return is_of_this_boot(self.boot_id) and self.boot_id != boot_id()

    def send(self, number: signal.Signals) -> bool:
        """Signals this very process; False where it is gone.

        The pidfd is taken before the identity is checked, so that a pid reused in between is never hit.
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


def take_back_signals() -> None:
    """Undo what whoever started this program left of signals, as some daemons and containers do.

    With SIGCHLD ignored the kernel reaps children, and each would seem to have ended well; SIGTERM, blocked, would
    end no rank.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


@functools.cache
def boot_id() -> str:
    """Differ after every restart of the machine, and in every PID namespace: where one pid is one process."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return _boot()
    # Versions that know of no namespaces go on with the same list.
    return _boot() if namespace == _FIRST_NAMESPACE else f"{_boot()}/{namespace}"


def is_of_this_boot(boot_id: str) -> bool:
    return boot_id.partition("/")[0] == _boot()


@functools.cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command name may hold spaces and brackets: fields are counted after the last one.
    state, *fields = stat.rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else int(fields[18])
