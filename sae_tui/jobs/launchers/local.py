"""The ranks of one attempt as child processes: started, watched, ended, and asked why."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.ending import RankEnding, signal_name
from sae_tui.jobs.files import last_line, open_log
from sae_tui.jobs.launchers.base import Beginning
from sae_tui.jobs.stacks import dump_stacks, odd_state
from sae_tui.jobs.words import listed
from trainer.contract.control import Rank
from trainer.contract.process import ProcessRef, boot_id
from trainer.contract.ranks import EXIT_FINISHED, EXIT_STOPPED, rank_environment, write_spec

KILL_AFTER_S = 5.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class RankProcess:
    """One rank: its process, and how and when it ended."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        # Gone already only if it died within microseconds; as a zombie of ours its pid is still its own.
        self.ref = ProcessRef.of(process.pid) or ProcessRef(process.pid, 0, boot_id())
        self.pidfd = os.pidfd_open(process.pid)
        self.ended: float | None = None
        self.ended_by_us = False

    @property
    def code(self) -> int | None:
        """As `subprocess` has it: negative for a signal, None while it lives."""
        return self.process.returncode

    @property
    def failed(self) -> bool:
        return self.code not in (None, EXIT_FINISHED, EXIT_STOPPED)


class RankGroup:
    """All ranks of an attempt; they hold the GPU locks with us and are told when we die."""

    def __init__(self, beginning: Beginning) -> None:
        self._job_id, self._locks, self._command = beginning.job_id, beginning.locks, beginning.command
        self._paths = beginning.paths
        self._spec = beginning.spec
        self._ending_since: float | None = None
        self._oom_kills = host_oom_kills()
        self._ranks: list[RankProcess] = []

    @property
    def _living(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.ended is None]

    @property
    def alive(self) -> bool:
        return bool(self._living)

    @property
    def is_waiting(self) -> bool:
        return False

    @property
    def has_failed(self) -> bool:
        return any(rank.failed for rank in self._ranks)

    @property
    def codes(self) -> set[int | None]:
        return {rank.code for rank in self._ranks}

    def start(self) -> None:
        argv = [*self._command(write_spec(self._spec))]
        for rank in range(self._spec.n_processes):
            self._ranks.append(RankProcess(rank, self._popen(argv, rank, self._locks)))

    def ask_to_stop(self) -> None:
        """Rank 0 reads the store by itself."""

    def rows(self) -> list[Rank]:
        return [self._row(rank) for rank in self._ranks]

    def _row(self, rank: RankProcess) -> Rank:
        ending = self._ending(rank)
        return Rank(
            job_id=self._job_id,
            attempt=self._spec.attempt,
            rank=rank.rank,
            pid=rank.ref.pid,
            start_ticks=rank.ref.start_ticks,
            boot_id=rank.ref.boot_id,
            exit_code=ending.exit_code,
            exit_signal=ending.exit_signal,
            ended=rank.ended,
            error=ending.error,
        )

    def _popen(self, argv: Sequence[str], rank: int, locks: Sequence[int]) -> subprocess.Popen[bytes]:
        log = open_log(self._paths.log(rank))
        supervisor = os.getpid()
        try:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=rank_environment(self._spec, rank),
                pass_fds=locks,
                preexec_fn=lambda: _die_with(supervisor),
            )
        finally:
            os.close(log)

    def wait(self, timeout_s: float) -> list[Rank]:
        """Returns as soon as one has ended: whose end was first matters."""
        poller = select.poll()
        for rank in self._living:
            poller.register(rank.pidfd, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(timeout_s * 1000)}
        ended = [rank for rank in self._living if rank.pidfd in ready]
        for rank in ended:
            rank.process.wait()
            rank.ended = time.time()
            os.close(rank.pidfd)
        return [self._row(rank) for rank in ended]

    def end(self) -> None:
        """SIGTERM to all that live; called again, SIGKILL once they have had 5 s."""
        if self._ending_since is None:
            self._ending_since = time.monotonic()
            self._send(signal.SIGTERM)
        elif time.monotonic() - self._ending_since > KILL_AFTER_S:
            self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for rank in self._living:
            rank.ended_by_us = True
            rank.ref.send(number)

    def endings(self) -> tuple[RankEnding, ...]:
        return tuple(self._ending(rank) for rank in self._ranks)

    def _ending(self, rank: RankProcess) -> RankEnding:
        code = rank.code
        killed = code is not None and code < 0
        return RankEnding(
            rank=rank.rank,
            exit_code=None if killed else code,
            exit_signal=-code if code is not None and killed else None,
            error=self._error(rank) if rank.failed else None,
        )

    def cause(self) -> str:
        first = self._first_failed()
        return self._error(first) if first else "its ranks had to be ended"

    @property
    def first_failed(self) -> int | None:
        first = self._first_failed()
        return first.rank if first else None

    def _first_failed(self) -> RankProcess | None:
        failed = [rank for rank in self._ranks if rank.failed and (self._word(rank) or not rank.ended_by_us)]
        return min(failed, key=self._failed_at, default=None)

    def describe(self) -> str:
        odd = [f"rank {rank.rank} {word}" for rank in self._living if (word := odd_state(rank.ref.pid))]
        return listed(odd) if odd else ""

    def dump_stacks(self, file: Path) -> None:
        dump_stacks({f"rank {rank.rank}": rank.ref for rank in self._living}, file)

    def _failed_at(self, rank: RankProcess) -> float:
        """When it left its last word, else when it ended.

        A rank that raises may still be closing down when its peers, cut off by it, are already gone.
        """
        try:
            return min(rank.ended or time.time(), self._exit_file(rank).stat().st_mtime)
        except OSError:
            return rank.ended or time.time()

    def _error(self, rank: RankProcess) -> str:
        if word := self._word(rank):
            return f"rank {rank.rank}: {word}" if len(self._ranks) > 1 else word
        code = rank.code or 0
        how = f"was killed ({signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL and not rank.ended_by_us and host_oom_kills() > self._oom_kills:
            how = "was killed by the kernel because the machine ran out of memory"
        line = last_line(self._paths.log(rank.rank))
        return f"rank {rank.rank} {how}" + (f"; its last log line: {line}" if line else "")

    def _word(self, rank: RankProcess) -> str | None:
        try:
            left = msgspec.json.decode(self._exit_file(rank).read_bytes(), type=dict[str, str | None])
        except (OSError, msgspec.MsgspecError):
            return None
        return left.get("error")

    def _exit_file(self, rank: RankProcess) -> Path:
        return self._paths.rank_exit(self._spec.attempt, rank.rank)


def host_oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since the machine started."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counters.get("oom_kill", 0))


def _die_with(supervisor: int) -> None:
    """Runs in the rank before its program: SIGTERM when the supervisor dies, also if it just has."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(1)
