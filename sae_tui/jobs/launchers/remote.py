"""A rank on another host, as known by the files that it leaves in the run folder."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from sae_tui.jobs.launchers.ranks import OneRank
from trainer.contract.paths import RunPaths
from trainer.contract.process import ProcessRef
from trainer.contract.runs.log_tail import last_line, tail
from trainer.contract.runs.rank_exit import NOTICED_WITHIN_S
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_STOPPED
from trainer.contract.runs.remote_rank_status import RankMark, read_mark

NOBODY = ProcessRef(0, 0, "")


class RemoteRank(OneRank):
    """A rank known by its mark; `launch_log` is what was printed before it had a log of its own."""

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
        """Exit code, negative for a signal; None while it runs, `EXIT_FAILED` where it left no mark of its end."""
        if self.ended is None:
            return None
        if self.never_ran:
            return EXIT_STOPPED
        if self.mark is None or not self.mark.has_ended:
            return EXIT_FAILED
        return -self.mark.exit_signal if self.mark.exit_signal else self.mark.exit_code

    def read(self) -> bool:
        """Read the rank's mark and tell whether it says something new."""
        mark = read_mark(self._mark_file)
        if mark is None or mark == self.mark:
            return False
        self.mark = mark
        if mark.has_ended:
            self.ended = time.time()
        return True

    def give_up(self, *, never_ran: bool) -> None:
        """Record an end of which the rank left no mark; `never_ran`, on request, makes it stopped instead of failed."""
        self.ended, self.never_ran = time.time(), never_ran

    def failed_at(self) -> float:
        """Return when the rank left its last record, or else was given up, in seconds since the epoch.

        The clock is that of the file system that all hosts share.
        """
        if (self.code or 0) < 0:
            return _first_modified(self._mark_file, default=self.ended) - NOTICED_WITHIN_S
        # A mark that tells of no end was written at the rank's start.
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
        return super().how() if self.mark.has_ended else "ended without a word"


def _last_cause(log: Path) -> str:
    """Return the last line on what went wrong before ranks had logs.

    Lines on how SLURM then ended the rest are no reason, and are skipped.
    """
    lines = [line for line in tail(log, 50) if any(map(str.isalnum, line))]
    return next((line for line in reversed(lines) if not _is_of_the_end(line)), "")


def _is_of_the_end(line: str) -> bool:
    """Tell whether SLURM reports how it ended the job, not that a program could not be started."""
    return line.startswith(("srun:", "slurmstepd")) and "execve()" not in line


def _first_modified(*files: Path, default: float | None) -> float:
    """Return when the first of the files changed, in seconds since the epoch; without any, the default, or now."""
    times = []
    for file in files:
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    return min(times, default=default or time.time())
