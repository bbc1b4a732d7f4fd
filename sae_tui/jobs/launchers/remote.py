"""A rank on another host; its state is read from files that it writes to the run folder."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from sae_tui.jobs.launchers.ranks import OneRank
from trainer.contract.paths import RunPaths
from trainer.contract.process import ProcessRef
from trainer.contract.runs.log_tail import last_line, tail
from trainer.contract.runs.rank_exit import BACKDATED_BY_S
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_STOPPED
from trainer.contract.runs.remote_rank_status import RankMark, read_mark

NOBODY = ProcessRef(0, 0, "")


class RemoteRank(OneRank):
    """A rank whose state is read from its mark file; `launch_log` contains output from before the rank's own log."""

    def __init__(self, rank: int, paths: RunPaths, attempt: int, launch_log: Path) -> None:
        super().__init__(rank, paths.rank_exit(attempt, rank))
        self.mark: RankMark | None = None
        self.never_ran = False
        self._mark_file = paths.rank_mark(attempt, rank)
        self._log, self._launch_log = paths.log(rank), launch_log

    @property
    def ref(self) -> ProcessRef:
        return self.mark.process if self.mark else NOBODY

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal, or None while the rank is running.

        If the rank has ended but its mark file does not record this, the exit code is `EXIT_FAILED`.
        """
        if self.ended is None:
            return None
        if self.never_ran:
            return EXIT_STOPPED
        if self.mark is None or not self.mark.has_ended:
            return EXIT_FAILED
        return -self.mark.exit_signal if self.mark.exit_signal else self.mark.exit_code

    def read(self) -> bool:
        """Read the rank's mark and return whether it has changed."""
        mark = read_mark(self._mark_file)
        if mark is None or mark == self.mark:
            return False
        self.mark = mark
        if mark.has_ended:
            self.ended = time.time()
        return True

    def give_up(self, *, never_ran: bool) -> None:
        """Record that a rank has ended, although its mark does not show this.

        If `never_ran`, the rank is not considered failed.
        """
        self.ended, self.never_ran = time.time(), never_ran

    def failed_at(self) -> float:
        """Return when the rank recorded its end or, if it did not, when it was given up on.

        The time is in seconds since the epoch, according to the clock of the file system shared by all hosts.
        """
        if (self.code or 0) < 0:
            return _first_modified(self._mark_file, default=self.ended) - BACKDATED_BY_S
        # A mark written when the rank started does not record the rank's end, so ignore it.
        has_ended = self.mark is not None and self.mark.has_ended
        words = [self._exit_file, self._mark_file] if has_ended else [self._exit_file]
        return _first_modified(*words, default=self.ended)

    @property
    def name(self) -> str:
        return super().name + (f" on {self.mark.host}" if self.mark else "")

    def last_line(self) -> str:
        return last_line(self._log) if self.mark else _last_cause(self._launch_log)

    def how(self) -> str:
        if self.mark is None:
            return "never started"
        return super().how() if self.mark.has_ended else "ended without a message"


def _last_cause(log: Path) -> str:
    """Return the last error line written before the ranks had their own logs.

    Skip lines in which SLURM reports ending the other ranks; they do not show the cause.
    """
    lines = [line for line in tail(log, 50) if any(map(str.isalnum, line))]
    return next((line for line in reversed(lines) if not _is_of_the_end(line)), "")


def _is_of_the_end(line: str) -> bool:
    """Return whether a line reports how SLURM ended the job, as opposed to a program that failed to start."""
    return line.startswith(("srun:", "slurmstepd")) and "execve()" not in line


def _first_modified(*files: Path, default: float | None) -> float:
    """Return the earliest modification time of the files, in seconds since the epoch.

    If none of the files exists, return the default or, if that is None, the current time.
    """
    times = []
    for file in files:
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    return min(times, default=default or time.time())
