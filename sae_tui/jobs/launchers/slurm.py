"""The ranks of one attempt on nodes that SLURM chooses.

The supervisor stays on the host that submitted; what it knows of ranks and run are files in the run folder, which all
nodes see.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.ending import RankEnding, signal_name
from sae_tui.jobs.files import last_line, tail, write_whole
from sae_tui.jobs.launchers.base import RankCommand
from sae_tui.jobs.launchers.cluster import SlurmJob
from sae_tui.jobs.launchers.ingest import Ingest
from sae_tui.jobs.launchers.sbatch import script, submission
from sae_tui.jobs.notes import tolerated
from trainer.contract.control import Control
from trainer.contract.job import JobConfig
from trainer.contract.marks import RankMark, read_mark
from trainer.contract.paths import RunPaths
from trainer.contract.process import ProcessRef
from trainer.contract.ranks import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, RankSpec, write_spec

KILL_AFTER_S = 5.0
# After a failure the job ends by itself, and SLURM then says why; nothing is ended by us before.
ENDS_ITSELF_S = 15.0
# A network file system may show a node's last words late.
WORDS_S = 5.0
# Peers notice a killed rank within milliseconds, and may be faster than who records its death.
NOTICED_WITHIN_S = 2.0
NOBODY = ProcessRef(0, 0, "")
_REASONS = {
    "BOOT_FAIL": "a node did not start",
    "CANCELLED": "it was cancelled",
    "DEADLINE": "its deadline has passed",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "a node ran out of memory; ask for more by --mem in launch.sbatch_options",
    "PREEMPTED": "another job took its nodes",
    "TIMEOUT": "its time limit was reached; raise launch.time_limit",
}


class RemoteRank:
    """A rank on a node: its mark, and when it was seen to have ended."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.mark: RankMark | None = None
        self.ended: float | None = None
        self.ended_by_us = False
        self.never_ran = False

    @property
    def ref(self) -> ProcessRef:
        return self.mark.process if self.mark else NOBODY

    @property
    def code(self) -> int | None:
        """Negative for a signal; of one that left no word, after its end, that it failed."""
        if self.ended is None:
            return None
        if self.never_ran:
            return EXIT_STOPPED
        if self.mark is None or not self.mark.has_ended:
            return EXIT_FAILED
        return -self.mark.exit_signal if self.mark.exit_signal else self.mark.exit_code

    @property
    def failed(self) -> bool:
        return self.code not in (None, EXIT_FINISHED, EXIT_STOPPED)


class SlurmAttempt:
    """Submits the batch script, follows the job, and takes the run's progress into its store."""

    def __init__(self, paths: RunPaths, spec: RankSpec, job: JobConfig) -> None:
        self._paths, self._job = paths, job
        self._spec = msgspec.structs.replace(spec, on_one_host=False, by_files=True)
        self._folder = paths.attempt(spec.attempt)
        self._ingest = Ingest(paths.progress_file(spec.attempt), paths.metrics_db)
        self._slurm: SlurmJob | None = None
        self._over_since: float | None = None
        self._failed_since: float | None = None
        self._cancelled_at: float | None = None
        self._asked_to_stop = self._has_run = False
        self._told = ""
        self.ranks: list[RemoteRank] = []

    @property
    def alive(self) -> list[RemoteRank]:
        return [rank for rank in self.ranks if rank.ended is None]

    @property
    def has_failed(self) -> bool:
        return any(rank.failed for rank in self.ranks)

    def start(self, command: RankCommand, locks: Sequence[int] = ()) -> None:
        """Queues the attempt, or takes up the one that was queued before; raises OSError where SLURM refuses it.

        SLURM gives out the GPUs, so that there are no locks to hand on.
        """
        argv = command(write_spec(self._spec))
        id_file = self._folder / "slurm_job"
        if id_file.exists():
            self._slurm = SlurmJob(id_file.read_text().strip())
        else:
            batch = self._folder / "job.sbatch"
            write_whole(batch, script(self._spec, self._job.launch, argv).encode())
            log = self._paths.logs / "slurm.log"
            self._slurm = SlurmJob.submit(submission(self._spec, self._job.launch, self._job.name, log, batch))
            write_whole(id_file, self._slurm.id.encode())
            self._tell("slurm", f"is job {self._slurm.id} of SLURM")
        self.ranks = [RemoteRank(rank) for rank in range(self._spec.n_processes)]

    def wait(self, timeout_s: float) -> list[RemoteRank]:
        """Within this time, the ranks of which there is news: that they ended, or on which host they run."""
        if not (news := self._news()):
            time.sleep(timeout_s)
            news = self._news()
        return news

    def ask_to_stop(self) -> None:
        """By a file that rank 0 looks for; a job that still waits for nodes ends at once."""
        if not self._asked_to_stop:
            write_whole(self._paths.stop_file(self._spec.attempt), b"")
            self._asked_to_stop = True
            self._end_if_pending()

    def end(self) -> None:
        """Cancels the job, which may save for SLURM's KillWait; called again, kills it once it has had 5 s."""
        if self._slurm is None or self._ends_itself():
            return
        now = time.monotonic()
        if self._cancelled_at is None:
            self._mark_ended_by_us()
            self._slurm.cancel()
            self._cancelled_at = now
        elif now - self._cancelled_at > KILL_AFTER_S:
            self._slurm.cancel("--signal=KILL", "--full")
            self._slurm.cancel()
            self._cancelled_at = now

    def endings(self) -> tuple[RankEnding, ...]:
        return tuple(self.ending(rank) for rank in self.ranks)

    def ending(self, rank: RemoteRank) -> RankEnding:
        code = rank.code
        killed = code is not None and code < 0
        return RankEnding(
            rank=rank.rank,
            exit_code=None if killed else code,
            exit_signal=-code if code is not None and killed else None,
            error=self._error(rank) if rank.failed else None,
        )

    def cause(self) -> str:
        """Why the attempt failed: what SLURM says where it ended the job, else the rank that failed first."""
        self._await_end()
        state = self._state
        if state in _REASONS and not (state == "CANCELLED" and self._cancelled_at):
            return f"SLURM ended it: {_REASONS[state]} ({state})"
        failed = [rank for rank in self.ranks if rank.failed and (rank.mark or not rank.ended_by_us)]
        if not failed:
            return "its ranks had to be ended"
        return self._error(min(failed, key=self._failed_at))

    # what is going on

    @property
    def _state(self) -> str:
        """SLURM's word for it; empty where it has not answered yet."""
        seen = self._slurm.seen if self._slurm else None
        return seen.state if seen else ""

    def _news(self) -> list[RemoteRank]:
        self._follow()
        news = [rank for rank in self.alive if self._read(rank)]
        if news and not self._asked_to_stop and self._paths.stop_file(self._spec.attempt).exists():
            self._tell("slurm", "its time limit in SLURM is near: it saves and stops", "warning")
        if self._over_since and time.monotonic() - self._over_since > WORDS_S:
            news += self._give_up()
        # After the marks, so that nothing a rank has said before its end is missing.
        with tolerated("taking in the run's progress"):
            self._ingest.poll()
        if not self.alive:
            self._ingest.close()
        return news

    def _follow(self) -> None:
        """What SLURM makes of the job; told where it changes."""
        if self._slurm is None or not self._slurm.look() or (seen := self._slurm.seen) is None:
            return
        if seen.is_over:
            self._over_since = self._over_since or time.monotonic()
            if seen.state in _REASONS and not self._cancelled_at and not self._asked_to_stop:
                self._tell("slurm", f"SLURM ended it: {_REASONS[seen.state]}", "warning")
        elif seen.state == "RUNNING":
            self._has_run = True
            self._tell("slurm", f"runs in SLURM on {seen.nodes}")
        elif seen.state == "PENDING":
            if seen.reason not in ("", "None"):
                self._tell("waiting", f"waits in SLURM: {seen.reason}")
            self._end_if_pending()

    def _end_if_pending(self) -> None:
        """Nothing of it is lost; SLURM itself sees that it has not begun meanwhile."""
        if self._asked_to_stop and self._slurm and not self._has_run:
            self._slurm.cancel("--state=PENDING")

    def _read(self, rank: RemoteRank) -> bool:
        """Whether its mark says something new."""
        mark = read_mark(self._paths.rank_mark(self._spec.attempt, rank.rank))
        if mark is None or mark == rank.mark:
            return False
        rank.mark = mark
        if mark.has_ended:
            rank.ended = time.time()
        return True

    def _give_up(self) -> list[RemoteRank]:
        """The job is over, and these have left no word."""
        stopped = self._asked_to_stop and self._state == "CANCELLED" and not any(rank.mark for rank in self.ranks)
        given_up = self.alive
        for rank in given_up:
            rank.ended, rank.never_ran = time.time(), stopped
        return given_up

    def _ends_itself(self) -> bool:
        """After a failure, srun ends the other ranks."""
        if not self.has_failed or self._over_since:
            return bool(self._over_since)
        self._failed_since = self._failed_since or time.monotonic()
        return time.monotonic() - self._failed_since < ENDS_ITSELF_S

    def _mark_ended_by_us(self) -> None:
        for rank in self.alive:
            rank.ended_by_us = True

    def _await_end(self) -> None:
        """SLURM's last word comes a moment after that of the ranks."""
        deadline = time.monotonic() + ENDS_ITSELF_S
        while self._slurm and not self._over_since and time.monotonic() < deadline:
            self._follow()
            time.sleep(0.1)

    # why it ended

    def _failed_at(self, rank: RemoteRank) -> float:
        """When it left its last word, by the clock of the file system that all hosts share."""
        is_killed = (rank.code or 0) < 0
        files = [self._paths.rank_exit(self._spec.attempt, rank.rank)] if not is_killed else []
        files.append(self._paths.rank_mark(self._spec.attempt, rank.rank))
        return min(_modified(files), default=time.time()) - (NOTICED_WITHIN_S if is_killed else 0)

    def _error(self, rank: RemoteRank) -> str:
        on = f" on {rank.mark.host}" if rank.mark else ""
        if word := self._word(rank):
            return f"rank {rank.rank}{on}: {word}" if len(self.ranks) > 1 else word
        code = rank.code or 0
        if rank.mark is None:
            how, line = "never started", _last_said(self._paths.logs / "slurm.log")
        else:
            how = f"was killed ({signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
            how = how if rank.mark.has_ended else "ended without a word"
            line = last_line(self._paths.log(rank.rank))
        return f"rank {rank.rank}{on} {how}" + (f"; its last log line: {line}" if line else "")

    def _word(self, rank: RemoteRank) -> str | None:
        try:
            file = self._paths.rank_exit(self._spec.attempt, rank.rank)
            left = msgspec.json.decode(file.read_bytes(), type=dict[str, str | None])
        except (OSError, msgspec.MsgspecError):
            return None
        return left.get("error")

    def _tell(self, kind: str, message: str, level: str = "info") -> None:
        """As an event of the job, once."""
        spec = self._spec
        if message == self._told or spec.control_db is None or spec.job_id is None:
            return
        with tolerated("telling what SLURM does"):
            control = Control(spec.control_db)
            try:
                control.add_event(spec.job_id, kind, message, level)
                self._told = message
            finally:
                control.close()


def _last_said(log: Path) -> str:
    """What went wrong before ranks could have logs of their own; that SLURM then ended the rest is no reason."""
    lines = [line for line in tail(log, 50) if any(map(str.isalnum, line))]
    return next((line for line in reversed(lines) if not line.startswith(("srun:", "slurmstepd"))), "")


def _modified(files: Iterable[os.PathLike[str]]) -> list[float]:
    found = []
    for file in files:
        try:
            found.append(os.stat(file).st_mtime)
        except OSError:
            continue
    return found
