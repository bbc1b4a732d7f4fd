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

from sae_tui.jobs.files import last_line
from sae_tui.jobs.launchers.base import Beginning
from sae_tui.jobs.launchers.ranks import OneRank, Ranks
from sae_tui.jobs.stacks import dump_stacks, is_halted, odd_state
from sae_tui.jobs.words import listed
from trainer.contract.paths import open_private
from trainer.contract.process import ProcessRef, boot_id
from trainer.contract.ranks import rank_environment, write_spec
from trainer.contract.records import Rank

KILL_AFTER_S = 5.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class RankProcess(OneRank):
    """A rank that is our child."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], exit_file: Path, log: Path) -> None:
        super().__init__(rank, exit_file)
        self.process = process
        # Gone already only if it died within microseconds; as a zombie of ours its pid is still its own.
        self._ref = ProcessRef.of(process.pid) or ProcessRef(process.pid, 0, boot_id())
        self.pidfd = os.pidfd_open(process.pid)
        self._log = log
        self._oom_kills = host_oom_kills()

    @property
    def ref(self) -> ProcessRef:
        return self._ref

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def failed_at(self) -> float:
        """When it left its last word, else when it ended.

        A rank that raises may still be closing down when its peers, cut off by it, are already gone.
        """
        try:
            return min(self.ended or time.time(), self._exit_file.stat().st_mtime)
        except OSError:
            return self.ended or time.time()

    def last_line(self) -> str:
        return last_line(self._log)

    def how(self) -> str:
        if self.code == -signal.SIGKILL and not self.ended_by_us and host_oom_kills() > self._oom_kills:
            return "was killed by the kernel because the machine ran out of memory"
        return super().how()


class RankGroup(Ranks[RankProcess]):
    """All ranks of an attempt; they hold the GPU locks with us and are told when we die."""

    is_waiting = False

    def __init__(self, beginning: Beginning) -> None:
        super().__init__(beginning)
        self._locks = beginning.locks
        self._ending_since: float | None = None

    def start(self) -> None:
        argv = [*self._command(write_spec(self._spec))]
        for rank in range(self._spec.n_processes):
            process = self._popen(argv, rank, self._locks)
            exit_file = self._paths.rank_exit(self._spec.attempt, rank)
            self.ranks.append(RankProcess(rank, process, exit_file, self._paths.log(rank)))

    def ask_to_stop(self) -> None:
        """Rank 0 reads the store by itself."""

    def _popen(self, argv: Sequence[str], rank: int, locks: Sequence[int]) -> subprocess.Popen[bytes]:
        log = open_private(self._paths.log(rank), os.O_APPEND)
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
        for rank in self.living:
            poller.register(rank.pidfd, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(timeout_s * 1000)}
        ended = [rank for rank in self.living if rank.pidfd in ready]
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
        for rank in self.living:
            rank.ended_by_us = True
            rank.ref.send(number)

    @property
    def is_halted(self) -> bool:
        return any(is_halted(rank.ref.pid) for rank in self.living)

    def describe(self) -> str:
        odd = [f"rank {rank.rank} {word}" for rank in self.living if (word := odd_state(rank.ref.pid))]
        return listed(odd) if odd else ""

    def dump_stacks(self, file: Path) -> None:
        dump_stacks({f"rank {rank.rank}": rank.ref for rank in self.living}, file)


def host_oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since the machine started."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counters.get("oom_kill", 0))


def _die_with(supervisor: int) -> None:
    """Runs in the rank before its program: SIGTERM when the supervisor dies, also if it just has."""
    # Until the program is there, the supervisor's own handler would take it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(1)
