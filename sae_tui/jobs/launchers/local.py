"""Runs an attempt's ranks as child processes of the supervisor."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sae_tui.jobs import named_python
from sae_tui.jobs.launchers.base import AttemptSetup
from sae_tui.jobs.launchers.early_ranks import start_rank
from sae_tui.jobs.launchers.ranks import OneRank, RankStates
from trainer.contract.files import write_whole
from trainer.contract.paths import open_private
from trainer.contract.process import ProcessRef, boot_id, state_of
from trainer.contract.runs.rank_exit import ChildRank, wait_for_ends
from trainer.contract.runs.rank_spec import rank_environment, write_spec
from trainer.contract.store.rows import Rank
from trainer.contract.wording import join_words

KILL_AFTER_S = 5.0
_DUMP_LIMIT_S = 20.0
# Maps the state letters in /proc/<pid>/stat to descriptions. State "D" is brief unless a disk or a driver hangs.
_ODD = {"T": "is halted (SIGSTOP)", "t": "is halted by a debugger", "D": "is waiting for a disk or a driver"}


class RankProcess(ChildRank, OneRank):
    """A rank running as one of our child processes."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], exit_file: Path, log: Path) -> None:
        super().__init__(rank, process, exit_file, log)
        # `of` returns None only if the rank has already died, and even then its pid is not reused until we reap it.
        self._ref = ProcessRef.of(process.pid) or ProcessRef(process.pid, 0, boot_id())

    @property
    def ref(self) -> ProcessRef:
        return self._ref


class RankGroup(RankStates[RankProcess]):
    """An attempt's ranks as child processes.

    The ranks and this process share the GPU locks. If this process dies, the kernel sends the ranks SIGTERM.
    """

    is_waiting = False

    def __init__(self, setup: AttemptSetup) -> None:
        super().__init__(setup)
        self._locks, self._python = setup.locks, setup.config.launch.python
        self._early = setup.early
        self._ending_since: float | None = None

    def start(self) -> None:
        argv = [*self._command(write_spec(self._spec))]
        for rank in range(self._spec.n_processes):
            process = self._popen(argv, rank, self._locks)
            exit_file = self._paths.rank_exit(self._spec.attempt, rank)
            self.ranks.append(RankProcess(rank, process, exit_file, self._paths.log(rank)))
        if self._early:
            self._early.end()

    def ask_to_stop(self) -> None:
        """Do nothing: rank 0 reads the request from the store itself."""

    def ask_to_finish(self) -> None:
        """Do nothing: rank 0 reads the request from the store itself."""

    def _popen(self, argv: Sequence[str], rank: int, locks: Sequence[int]) -> subprocess.Popen[bytes]:
        environment = rank_environment(self._spec, rank, named_python.variables(self._python))
        log = open_private(self._paths.log(rank), os.O_APPEND)
        try:
            early = self._early.take(rank, argv, environment, (log, *locks)) if self._early else None
            return early or start_rank(argv, environment, log, locks)
        finally:
            os.close(log)

    def wait(self, timeout_s: float) -> list[Rank]:
        return [self._row(rank) for rank in wait_for_ends(self.living, timeout_s)]

    def end(self) -> None:
        """Send SIGTERM to all live ranks; calls more than 5 s later send SIGKILL."""
        if self._ending_since is None:
            self._ending_since = time.monotonic()
            self._send(signal.SIGTERM)
        elif time.monotonic() - self._ending_since > KILL_AFTER_S:
            for rank in self.living:
                rank.kill()

    def _send(self, number: signal.Signals) -> None:
        for rank in self.living:
            rank.ended_by_us = True
            rank.ref.send(number)

    @property
    def is_halted(self) -> bool:
        return any(is_halted(rank.ref.pid) for rank in self.living)

    def describe(self) -> str:
        odd = [f"rank {rank.rank} {word}" for rank in self.living if (word := odd_state(rank.ref.pid))]
        return join_words(odd) if odd else ""

    def dump_stacks(self, file: Path) -> None:
        dump_stacks({f"rank {rank.rank}": rank.ref for rank in self.living}, file)


def odd_state(pid: int) -> str:
    """Describe what prevents a process from running, or return "" if it is running or waiting for other processes."""
    return _ODD.get(state_of(pid), "")


def is_halted(pid: int) -> bool:
    """Return whether a process is halted by SIGSTOP or a debugger."""
    return state_of(pid) in ("T", "t")


def dump_stacks(processes: Mapping[str, ProcessRef], file: Path) -> None:
    """Write the Python stacks of these processes to a file; if a stack cannot be read, write the reason instead.

    This also works for processes that are halted or blocked in C++ code.
    """
    sections = [f"== {name} (pid {ref.pid}) {odd_state(ref.pid)}\n{_stack(ref)}\n" for name, ref in processes.items()]
    write_whole(file, "\n".join(sections).encode(errors="replace"))


def _stack(process: ProcessRef) -> str:
    command = _py_spy()
    if command is None:
        return "(py-spy is not installed)"
    if not process.is_alive():
        return "(it has ended)"
    # Do not pause the process while reading its stacks: this process could hang if it paused a hung process.
    arguments = [command, "dump", "--nonblocking", "--pid", str(process.pid)]
    try:
        done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=_DUMP_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({error})"
    return (done.stdout or done.stderr).decode(errors="replace")


def _py_spy() -> str | None:
    """Return the path of py-spy, or None if it is not installed; prefer the py-spy next to this Python interpreter."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
