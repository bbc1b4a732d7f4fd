"""Records how ranks exit, and finds the rank that failed first: other ranks often fail as a consequence."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from trainer.contract.json_file import read_json
from trainer.contract.paths import DATA_RECORD
from trainer.contract.runs.data_record import DataRecord, cut_short
from trainer.contract.runs.log_tail import last_line
from trainer.contract.runs.rank_spec import EXIT_FINISHED, EXIT_STOPPED

# A killed rank's death is backdated by this many seconds: other ranks fail within milliseconds of it, and
# their failures may be noticed first.
BACKDATED_BY_S = 2.0
# Seconds to wait after SIGKILL. The kernel needs a few seconds to free hundreds of GB, and a process on a hung GPU
# never exits.
GIVEN_UP_AFTER_S = 60.0


class RankEnd:
    """Records how and when a rank exited; the rank itself writes its error to `exit_file`."""

    def __init__(self, rank: int, exit_file: Path) -> None:
        self.rank = rank
        self.ended: float | None = None
        self.ended_by_us = False
        self._exit_file = exit_file

    @property
    @abstractmethod
    def code(self) -> int | None:
        """The rank's exit code, negative for a signal, or None while the rank is alive."""

    @abstractmethod
    def failed_at(self) -> float:
        """Return the time of the failure in seconds since the epoch, to find the first of several failures."""

    @abstractmethod
    def last_line(self) -> str:
        """Return the last line of the rank's output."""

    hangs = False

    @property
    def failed(self) -> bool:
        return self.code not in (None, EXIT_FINISHED, EXIT_STOPPED)

    @property
    def name(self) -> str:
        return f"rank {self.rank}"

    @property
    def recorded_error(self) -> str | None:
        """The error that the rank itself recorded, or None."""
        return (read_json(self._exit_file, dict[str, str | None]) or {}).get("error")

    def error(self, n_ranks: int) -> str:
        """Return a sentence about the failure: the rank's recorded error, or else how it exited and its last output."""
        if not self.hangs and (cause := self.recorded_error or self._cut_shard()):
            return f"{self.name}: {cause}" if n_ranks > 1 else cause
        line = self.last_line()
        return f"{self.name} {self.how()}" + (f"; its last log line: {line}" if line else "")

    def _cut_shard(self) -> str | None:
        """If SIGBUS killed the rank, return a sentence about the truncated shard; otherwise None."""
        if self.code != -signal.SIGBUS:
            return None
        return cut_short(read_json(self._exit_file.with_name(DATA_RECORD), DataRecord) or [])

    def how(self) -> str:
        code = self.code or 0
        return f"was killed ({signal_name(-code)})" if code < 0 else f"ended with exit code {code}"


class ChildRank(RankEnd):
    """A rank that is a child of this process."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], exit_file: Path, log: Path) -> None:
        super().__init__(rank, exit_file)
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.killed_at: float | None = None  # monotonic time
        self.hangs = False
        self._log = log
        self._oom_kills = host_oom_kills()

    @property
    def code(self) -> int | None:
        return -signal.SIGKILL if self.hangs else self.process.returncode

    def kill(self) -> None:
        """Send SIGKILL; if the rank survives for `GIVEN_UP_AFTER_S`, treat it as exited and as the cause of failure."""
        if self.killed_at is None:
            self.killed_at = time.monotonic()
        elif self.ended is None and time.monotonic() - self.killed_at > GIVEN_UP_AFTER_S:
            self.hangs, self.ended, self.ended_by_us = True, time.time(), False
            os.close(self.pidfd)
            return
        self.ended_by_us |= self.ended is None
        self.process.kill()

    @property
    def was_killed(self) -> bool:
        """Whether another process sent SIGKILL; a rank failing because of other ranks never exits this way."""
        return self.code == -signal.SIGKILL and not self.ended_by_us and not self.hangs

    def failed_at(self) -> float:
        """Return when the rank recorded its error or, if it did not, when it exited.

        If another process killed the rank, return a time `BACKDATED_BY_S` before its exit. The time of the record is
        preferred because a rank that raises an error may shut down more slowly than the other ranks, which exit as soon
        as they lose their connection to it.
        """
        ended = self.ended or time.time()
        if self.hangs:
            return 0.0  # the other ranks waited for this one
        if self.was_killed:
            return ended - BACKDATED_BY_S
        try:
            return min(ended, self._exit_file.stat().st_mtime)
        except OSError:
            return ended

    def last_line(self) -> str:
        return last_line(self._log)

    def how(self) -> str:
        if self.hangs:
            return f"did not exit within {GIVEN_UP_AFTER_S:.0f} s of being killed, so its GPU or a disk hangs"
        if self.was_killed and host_oom_kills() > self._oom_kills:
            return "was killed by the kernel because the machine ran out of memory"
        return super().how()


C = TypeVar("C", bound=ChildRank)
R = TypeVar("R", bound=RankEnd)


def wait_for_ends(ranks: Iterable[C], timeout_s: float) -> list[C]:
    """Wait up to `timeout_s` seconds for a rank to exit, and return the ranks that have exited."""
    living = [rank for rank in ranks if rank.ended is None]
    poller = select.poll()
    for rank in living:
        poller.register(rank.pidfd, select.POLLIN)
    ready = {descriptor for descriptor, _ in poller.poll(timeout_s * 1000)}
    # A signal handler may have given up waiting for this rank in the meantime.
    ended = [rank for rank in living if rank.ended is None and rank.pidfd in ready]
    for rank in ended:
        rank.process.wait()
        rank.ended = time.time()
        os.close(rank.pidfd)
    return ended


def first_failed(ranks: Iterable[R]) -> R | None:
    """Return the rank that failed first, or None; ignore ranks that this process killed and that recorded no error."""
    failed = [rank for rank in ranks if rank.failed and (rank.recorded_error or not rank.ended_by_us)]
    return min(failed, key=lambda rank: rank.failed_at(), default=None)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def host_oom_kills() -> int:
    """Return how many processes the kernel's OOM killer has killed since boot; 0 if unknown."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counters.get("oom_kill", 0))
