"""The ranks of one attempt as child processes: started, watched, ended, and asked why."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.ending import RankEnding, signal_name
from sae_tui.jobs.files import last_line, open_log
from trainer.contract.paths import RunPaths
from trainer.contract.process import ProcessRef, boot_id
from trainer.contract.ranks import EXIT_FINISHED, EXIT_STOPPED, RankSpec, rank_environment, write_spec

RankCommand = Callable[[Path], Sequence[str]]

KILL_AFTER_S = 5.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
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

    def __init__(self, paths: RunPaths, spec: RankSpec) -> None:
        self._paths = paths
        self._spec = spec
        self._ending_since: float | None = None
        self.ranks: list[RankProcess] = []

    @property
    def alive(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.ended is None]

    @property
    def has_failed(self) -> bool:
        return any(rank.failed for rank in self.ranks)

    def start(self, command: RankCommand, locks: Sequence[int]) -> None:
        """Starts every rank; raises OSError where one cannot be, those started before are then to be ended."""
        argv = [*command(write_spec(self._spec))]
        for rank in range(self._spec.n_processes):
            self.ranks.append(RankProcess(rank, self._popen(argv, rank, locks)))

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

    def wait(self, timeout_s: float) -> list[RankProcess]:
        """The ranks that ended within this time, returning as soon as one has: whose end was first matters."""
        poller = select.poll()
        for rank in self.alive:
            poller.register(rank.pidfd, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(timeout_s * 1000)}
        ended = [rank for rank in self.alive if rank.pidfd in ready]
        for rank in ended:
            rank.process.wait()
            rank.ended = time.time()
            os.close(rank.pidfd)
        return ended

    def ask_to_stop(self) -> None:
        """Nothing to do: rank 0 looks into the store itself."""

    def end(self) -> None:
        """SIGTERM to all that live; called again, SIGKILL once they have had 5 s."""
        if self._ending_since is None:
            self._ending_since = time.monotonic()
            self._send(signal.SIGTERM)
        elif time.monotonic() - self._ending_since > KILL_AFTER_S:
            self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for rank in self.alive:
            rank.ended_by_us = True
            rank.ref.send(number)

    def endings(self) -> tuple[RankEnding, ...]:
        return tuple(self.ending(rank) for rank in self.ranks)

    def ending(self, rank: RankProcess) -> RankEnding:
        code = rank.code
        killed = code is not None and code < 0
        return RankEnding(
            rank=rank.rank,
            exit_code=None if killed else code,
            exit_signal=-code if code is not None and killed else None,
            error=self._error(rank) if rank.failed else None,
        )

    def cause(self) -> str:
        """Why the attempt failed: what the rank says that failed first."""
        failed = [rank for rank in self.ranks if rank.failed and (self._word(rank) or not rank.ended_by_us)]
        if not failed:
            return "its ranks had to be ended"
        return self._error(min(failed, key=self._failed_at))

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
            return f"rank {rank.rank}: {word}" if len(self.ranks) > 1 else word
        code = rank.code or 0
        how = f"was killed ({signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
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


def become_subreaper() -> None:
    """Orphans among our descendants become our children, so that they can be found and ended."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(timeout_s: float = 5.0) -> None:
    """Kills and reaps whatever the ranks left behind (data loader workers, compilers)."""
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
    """The living children of a process; as they die, theirs become children of the subreaper."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent_pid(entry) == parent and (ref := ProcessRef.of(int(entry.name))):
            found.append(ref)
    return found


def _parent_pid(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return None


def _die_with(supervisor: int) -> None:
    """Runs in the rank before its program: SIGTERM when the supervisor dies, also if it just has."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(1)
