"""Runs an attempt's ranks on nodes chosen by SLURM.

The supervisor stays on the host that submitted the job, and reads the ranks' state and progress from files in the run
folder, which is accessible from all nodes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.launchers.base import AttemptSetup
from sae_tui.jobs.launchers.cluster import SlurmError, SlurmJob, down_nodes, hosts_in
from sae_tui.jobs.launchers.ingest import Ingest
from sae_tui.jobs.launchers.ranks import RankStates
from sae_tui.jobs.launchers.remote import RemoteRank
from sae_tui.jobs.launchers.requeues import Interruption, failed_nodes
from sae_tui.jobs.launchers.sbatch import ID_FILE, script, submission
from sae_tui.jobs.launchers.slurm_array import BATCH_FILE, submit_in_array
from sae_tui.jobs.supervisor_log import note, tolerate, tolerate_disk
from trainer.contract.errors import UserError
from trainer.contract.files import write_own, write_whole
from trainer.contract.runs.log_tail import tail
from trainer.contract.runs.rank_spec import write_spec
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Rank
from trainer.contract.wording import join_words

KILL_AFTER_S = 5.0
# If a failed job ends on its own, SLURM reports the reason, so wait this many seconds before cancelling the job.
ENDS_ITSELF_S = 15.0
# How long the last data written by a node may take to become visible on a network file system.
WORDS_S = 5.0
_NODE_LOST = ("BOOT_FAIL", "NODE_FAIL")
_NODE_FAILURE = re.compile(r"Node failure on ([\w.-]+)")
_REASONS = {
    "BOOT_FAIL": "a node did not start",
    "CANCELLED": "it was cancelled",
    "DEADLINE": "its deadline has passed",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "a node ran out of memory; request more with --mem in launch.sbatch_options",
    "PREEMPTED": "another job took its nodes",
    "TIMEOUT": "its time limit was reached; raise launch.time_limit",
}


def cancel_left_behind(folder: Path) -> None:
    """Cancel the SLURM job for an attempt whose supervisor has exited; `folder` is the attempt's folder."""
    try:
        SlurmJob.read(folder / ID_FILE).cancel()
    except FileNotFoundError:
        return
    except (OSError, UserError) as error:
        note(f"cancelling its SLURM job: {error}")


class SlurmAttempt(RankStates[RemoteRank]):
    """Submits an attempt's batch script, polls the SLURM job, and copies its progress into the run's store."""

    _what = "its ranks are"
    _near_limit = "it saves and stops"
    # SLURM's states for a job that was stopped on request before its ranks started. SLURM forgets an array's task that
    # is cancelled while it is pending.
    _stopped_states: tuple[str, ...] = ("CANCELLED", "UNKNOWN")

    def __init__(self, setup: AttemptSetup) -> None:
        super().__init__(setup)
        spec, paths = setup.spec, setup.paths
        self._job = setup.config
        self._spec = msgspec.structs.replace(spec, on_one_host=self._job.launch.nodes == 1, by_files=True)
        self._folder = paths.attempt(spec.attempt)
        # Contains SLURM's output, and the ranks' output until they open their own logs.
        self._log = paths.logs / "slurm.log"
        self._ingest = Ingest(paths.progress_file(spec.attempt), paths.metrics_db)
        self._slurm: SlurmJob | None = None
        self._over_since: float | None = None
        self._failed_since: float | None = None
        self._cancelled_at: float | None = None
        self._asked_to_stop = self._has_run = False
        self._told = ""

    @property
    def is_halted(self) -> bool:
        """False: this host cannot determine the state of processes on other hosts."""
        return False

    @property
    def is_waiting(self) -> bool:
        return not self._has_run

    def start(self) -> None:
        """Submit the attempt to SLURM, or attach to its SLURM job if it has already been submitted.

        Raise `OSError` if SLURM refuses the job. SLURM allocates the GPUs, so the ranks inherit no locks.
        """
        argv = self._command(write_spec(self._spec))
        id_file, batch = self._folder / ID_FILE, self._folder / BATCH_FILE
        is_first_start = not batch.exists()
        write_own(batch, self._script(argv))
        self._slurm = SlurmJob.read(id_file) if id_file.exists() else None
        if self._slurm and is_first_start and self._slurm.is_gone():
            # It was submitted with its array, but its task did not wait for this supervisor any longer.
            id_file.unlink()
            self._slurm = None
        if self._slurm is None:
            self._slurm = self._submit(batch)
            if not id_file.exists():
                self._remember(id_file, self._slurm)
        self._slurm.share_looks(self._paths.root.parent.parent / "locks")
        if is_first_start:
            self._tell("slurm", f"is SLURM job {self._slurm.id}")
        self.ranks = self._new_ranks()

    def _script(self, argv: Sequence[str]) -> str:
        """Return the batch script, which runs `argv` for each rank."""
        return script(self._spec, self._job.launch, argv)

    def _submit(self, batch: Path) -> SlurmJob:
        """Submit the batch script, in one SLURM job array with the other jobs of this job's array."""
        spec = self._spec
        if spec.control_db is None or spec.job_id is None:
            return self._submit_script(batch)

        def alone() -> SlurmJob:
            return self._submit_script(batch)

        return submit_in_array(spec.control_db, spec.job_id, self._paths, alone, self._submit_array)

    def _submit_array(self, batch: Path, options: Sequence[str]) -> SlurmJob:
        """Submit the script of a SLURM job array; its tasks write to their jobs' own logs."""
        first, *others, file = self._submission(batch, ())
        log = f"--output={self._paths.logs / 'slurm-array.log'}".replace("%", "%%")
        kept = [word for word in others if not word.startswith(("--output=", "--job-name="))]
        try:
            return SlurmJob.submit([first, *kept, log, *options, file], self._environment())
        except SlurmError as error:
            self._tell("slurm", f"is submitted without its array, so --at-once has no effect: {error}", "warning")
            raise

    def _submit_script(self, batch: Path) -> SlurmJob:
        """Submit a batch script to nodes that have not failed, or to any nodes if there are too few others."""
        failed = failed_nodes(self._paths, self._spec.attempt)
        try:
            return SlurmJob.submit(self._submission(batch, failed), self._environment())
        except SlurmError:
            if not failed:
                raise
        job = SlurmJob.submit(self._submission(batch, ()), self._environment())
        self._tell("slurm", f"may run on {join_words(failed)} again, because SLURM has too few other nodes", "warning")
        return job

    def _submission(self, batch: Path, avoid: Sequence[str]) -> list[str]:
        """Return the sbatch command for a batch script."""
        return submission(self._spec, self._job.launch, self._job.name, self._log, batch, avoid=avoid)

    def _environment(self) -> Mapping[str, str] | None:
        """Return the environment that SLURM stores for the job; None means this process's environment."""
        return None

    def _new_ranks(self) -> list[RemoteRank]:
        ranks = range(self._spec.n_processes)
        return [RemoteRank(rank, self._paths, self._spec.attempt, self._log) for rank in ranks]

    def _remember(self, id_file: Path, slurm: SlurmJob) -> None:
        """Write the SLURM job's number to a file; if this fails, cancel the job, as it could not be found again."""
        try:
            write_own(id_file, slurm.id)
        except OSError:
            slurm.cancel()
            raise

    def wait(self, timeout_s: float) -> list[Rank]:
        """Wait up to `timeout_s` seconds; return the ranks that have started or ended."""
        if not (news := self._news()):
            time.sleep(timeout_s)
            news = self._news()
        return [self._row(rank) for rank in news]

    def ask_to_stop(self) -> None:
        """Write the file that asks rank 0 to stop; if the job is still waiting for nodes, cancel it."""
        if self._asked_to_stop:
            return
        try:
            write_whole(self._paths.stop_file(self._spec.attempt), b"")
        except OSError as error:
            note(f"asking {self._processes} to stop failed and will be retried: {error}")
            return
        self._asked_to_stop = True
        self._end_if_pending()

    def ask_to_finish(self) -> None:
        """Write the file that asks rank 0 to cool down, even if the job is still waiting for nodes."""
        finish_file = self._paths.finish_file(self._spec.attempt)
        if not finish_file.exists():
            with tolerate_disk("asking the ranks to finish early"):
                write_whole(finish_file, b"")

    def end(self) -> None:
        """Cancel the job, which can still save during SLURM's KillWait; calls more than 5 s later kill it."""
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

    def interruption(self) -> Interruption | None:
        """Return which node failed, or that a preemption took the nodes; None if SLURM ended the job otherwise."""
        self._await_end()
        if self._slurm is None or self._asked_to_stop or (latest := self._slurm.seen) is None:
            return None
        if latest.state == "PREEMPTED" or self._slurm.was_preempted():
            return Interruption(f"another job took its nodes, {latest.nodes}")
        # If a node is lost, its peers fail, and the job may end before SLURM notices that the node does not respond.
        may_be_lost = latest.state == "FAILED" or (latest.state == "CANCELLED" and self._cancelled_at)
        if latest.state not in _NODE_LOST and not may_be_lost:
            return None
        if failed := self._failed_nodes(latest.nodes):
            return Interruption(f"{'node' if len(failed) == 1 else 'nodes'} {join_words(failed)} failed", tuple(failed))
        return None if may_be_lost else Interruption(f"one of its nodes, {latest.nodes}, failed")

    def _failed_nodes(self, nodes: str) -> list[str]:
        """Return which of the job's nodes have failed, according to SLURM's messages or the nodes' present states."""
        reported = {name for line in tail(self._log, 50) for name in _NODE_FAILURE.findall(line)}
        failed = reported.intersection(hosts_in(nodes)) if reported else set()
        return sorted(failed) or down_nodes(nodes)

    def cause(self) -> str:
        """Return why the attempt failed: SLURM's reason if SLURM ended it, or the error of the first failed rank."""
        self._await_end()
        state = self._state
        if state in _REASONS and not (state == "CANCELLED" and self._cancelled_at):
            return f"SLURM ended it: {_REASONS[state]} ({state})"
        return super().cause()

    def describe(self) -> str:
        return f"{self._what} on {self._slurm.seen.nodes}" if self._slurm and self._slurm.seen else ""

    def dump_stacks(self, file: Path) -> None:
        """Write the node names to the file instead: this host cannot read the stacks of remote processes."""
        where = self.describe() or "SLURM has not responded"
        write_whole(file, f"{where}; run `py-spy dump` there to see what they are doing\n")

    # The methods below track the state of the SLURM job.

    @property
    def _state(self) -> str:
        """SLURM's name for the job's state, or "" before SLURM has responded."""
        latest = self._slurm.seen if self._slurm else None
        return latest.state if latest else ""

    @property
    def _is_near_its_limit(self) -> bool:
        """Whether the batch script received the signal that SLURM sends before the time limit."""
        return not self._asked_to_stop and self._paths.stop_file(self._spec.attempt).exists()

    def _news(self) -> list[RemoteRank]:
        self._follow()
        news = [rank for rank in self.living if rank.read()]
        if news and self._is_near_its_limit:
            self._tell("slurm", f"its SLURM time limit is near, so {self._near_limit}", "warning")
        if self._over_since and time.monotonic() - self._over_since > WORDS_S:
            news += self._give_up()
        # Read the progress after the marks so that all progress made before a rank ended is stored.
        with tolerate("reading the run's progress"):
            while self._ingest.poll() and not self.alive:
                pass
        if not self.alive:
            self._ingest.close()
            self._stop_looking()
        return news

    def _follow(self) -> None:
        """Query the job's state from SLURM, and record each state change as an event."""
        if self._slurm is None or not self._slurm.look() or (latest := self._slurm.seen) is None:
            return
        if latest.is_over:
            self._over_since = self._over_since or time.monotonic()
            if latest.state in _REASONS and not self._cancelled_at and not self._asked_to_stop:
                self._tell("slurm", f"SLURM ended it: {_REASONS[latest.state]}", "warning")
        elif latest.state == "RUNNING":
            self._has_run = True
            self._tell("slurm", f"runs in SLURM on {latest.nodes}")
        elif latest.state == "PENDING":
            if latest.reason not in ("", "None"):
                self._tell("waiting", f"waits in SLURM: {latest.reason}")
            self._end_if_pending()

    def _end_if_pending(self) -> None:
        """Cancel the job if it was asked to stop before it started, because it then has nothing to save.

        SLURM cancels it only if it has not started in the meantime.
        """
        if self._asked_to_stop and self._slurm and not self._has_run:
            self._slurm.cancel("--state=PENDING")

    def _give_up(self) -> list[RemoteRank]:
        """Mark all ranks without a recorded end as ended now that the SLURM job is over, and return these ranks."""
        stopped = self._asked_to_stop and self._state in self._stopped_states
        stopped = stopped and not any(rank.mark for rank in self.ranks)
        given_up = self.living
        for rank in given_up:
            rank.give_up(never_ran=stopped)
        return given_up

    def _ends_itself(self) -> bool:
        """Return whether the job is about to end on its own; srun stops all ranks if one fails."""
        if self._over_since:
            return True
        if not self.has_failed:
            return False
        self._failed_since = self._failed_since or time.monotonic()
        return time.monotonic() - self._failed_since < ENDS_ITSELF_S

    def _mark_ended_by_us(self) -> None:
        for rank in self.living:
            rank.ended_by_us = True

    def _await_end(self) -> None:
        """Wait up to 15 s for the job's final state, which SLURM reports shortly after the ranks have ended."""
        deadline = time.monotonic() + ENDS_ITSELF_S
        while self._slurm and not self._over_since and time.monotonic() < deadline:
            self._follow()
            time.sleep(0.1)
        self._stop_looking()

    def _stop_looking(self) -> None:
        """Free the array's query for other supervisors; this one may live on, for another attempt."""
        if self._slurm:
            self._slurm.close()

    def _tell(self, kind: str, message: str, level: str = "info") -> None:
        """Add an event to the job, unless the last reported event had the same message."""
        spec = self._spec
        if message == self._told or spec.control_db is None or spec.job_id is None:
            return
        with tolerate("reporting the SLURM state"):
            control = Control(spec.control_db)
            try:
                control.add_event(spec.job_id, kind, message, level)
                self._told = message
            finally:
                control.close()
