"""The supervisor of one job: waits for its GPUs, runs its ranks, and records how it ended.

`python -m sae_tui.jobs.supervise DATA_DIR JOB_ID` forks into the background. It loads no torch and
nothing of the screen, since one of these lives for as long as its job waits and runs.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from sae_tui.jobs.ending import Ending, write_ending
from sae_tui.jobs.locks import GpuLocks
from sae_tui.jobs.notes import note, tolerated
from sae_tui.jobs.queue import Line
from sae_tui.jobs.ranks import RankCommand, RankGroup, RankProcess, become_subreaper, end_descendants
from sae_tui.jobs.watch import Watch
from trainer.contract.control import Control, Job, Rank
from trainer.contract.paths import DataDir
from trainer.contract.problems import UserError
from trainer.contract.process import ProcessRef
from trainer.contract.ranks import EXIT_FINISHED, EXIT_STOPPED, RankSpec, rank_command
from trainer.contract.states import JobState

TICK_S = 0.25
TICKS_PER_TRY = 4
# How long a supervisor that is told to end (a shutdown) lets its ranks save.
SAVE_S = 30.0
STORE_TRIES = 60
FOLDER_GONE = "its run folder was deleted"


class Supervisor:
    """Owns the job's state from `queued` to its end."""

    def __init__(self, data: DataDir, job_id: int, command: RankCommand = rank_command) -> None:
        self._data = data
        self._paths = data.run(job_id)
        self._control = Control(data.control_db)
        self._job = self._control.job(job_id)
        self._command = command
        self._locks = GpuLocks(data.locks, self._job.gpu_uuids)
        self._told_to_end_at: float | None = None
        self._killed = False
        self._failure = ""

    def register(self) -> None:
        """Puts this process into the job's row and takes over the signals that end programs."""
        os.umask(0o077)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        become_subreaper()
        me = ProcessRef.current()
        self._control.update(self._job.id, supervisor_pid=me.pid, supervisor_start=me.start_ticks, boot_id=me.boot_id)

    def run(self) -> None:
        """The whole life of the job; returns when nothing of it is left."""
        if not self._wait_for_gpus():
            return
        group = self._start_ranks()
        stop_recording = _record_gpus(self._data, self._job) if group.alive else None
        self._watch(group)
        if stop_recording:
            stop_recording()
        end_descendants()
        self._conclude(*self._verdict(group), group)

    def _wait_for_gpus(self) -> bool:
        """True with locks and lease taken; False where the job ended, or was ended, before it could start."""
        line = Line(self._data, self._control, self._job, self._locks)
        for tick in itertools.count():
            with tolerated("waiting for GPUs"):
                if self._control.job(self._job.id).state != JobState.QUEUED:
                    return False
                if self._told_to_end_at or self._control.requested(self._job.id):
                    return self._conclude(JobState.STOPPED, None)
                if not self._paths.root.is_dir():
                    return self._conclude(JobState.FAILED, FOLDER_GONE)
                if tick % TICKS_PER_TRY == 0 and line.try_start():
                    self._job = line.job
                    return True
            time.sleep(TICK_S)
        raise AssertionError("unreachable")

    def _start_ranks(self) -> RankGroup:
        job = self._job
        spec = RankSpec(
            run_dir=self._paths.root,
            output_dir=self._data.sae(job.id),
            attempt=job.attempt,
            world_size=job.world_size,
            device=job.device,
            gpu_uuids=job.gpu_uuids if job.device == "cuda" else (),
            control_db=self._data.control_db,
            job_id=job.id,
            box_file=self._data.box_file,
            as_threads=job.mode == "dp",
        )
        group = RankGroup(self._paths, spec)
        try:
            group.start(self._command, self._locks.descriptors)
        except OSError as error:
            self._failure = f"its ranks could not be started: {error.strerror or error}"
        self._record(group, group.ranks)
        return group

    def _watch(self, group: RankGroup) -> None:
        """Until the last rank is gone: requests in, progress out, and all ranks ended when one fails."""
        watch = Watch(self._control, self._job, self._paths)
        while group.alive:
            ended = group.wait(TICK_S)
            self._record(group, ended)
            watch.poll()
            if not self._paths.root.is_dir():
                self._failure = self._failure or FOLDER_GONE
            if self._must_end(watch) or self._failure or group.has_failed:
                group.end()
        watch.close()

    def _must_end(self, watch: Watch) -> bool:
        """A signal to this process is a stop request first, and a kill when nothing comes of it."""
        if self._told_to_end_at and not watch.asked_to_stop:
            watch.request_stop()
        overdue = self._told_to_end_at and time.monotonic() - self._told_to_end_at > SAVE_S
        self._killed = bool(self._killed or watch.asked_to_kill or overdue)
        return self._killed

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """The second one does not wait any longer."""
        self._killed = self._killed or self._told_to_end_at is not None
        self._told_to_end_at = self._told_to_end_at or time.monotonic()

    def _record(self, group: RankGroup, ranks: Iterable[RankProcess]) -> None:
        for rank in ranks:
            ending = group.ending(rank)
            row = Rank(
                job_id=self._job.id,
                attempt=self._job.attempt,
                rank=rank.rank,
                pid=rank.ref.pid,
                start_ticks=rank.ref.start_ticks,
                boot_id=rank.ref.boot_id,
                exit_code=ending.exit_code,
                exit_signal=ending.exit_signal,
                ended=rank.ended,
                error=ending.error,
            )
            with tolerated(f"recording rank {rank.rank}"):
                self._control.record_rank(row)

    def _verdict(self, group: RankGroup) -> tuple[JobState, str | None]:
        """The final state and its reason, once every rank has ended."""
        codes = {rank.code for rank in group.ranks}
        if self._failure:
            return JobState.FAILED, self._failure
        if codes <= {EXIT_FINISHED, EXIT_STOPPED}:
            return (JobState.STOPPED if EXIT_STOPPED in codes else JobState.FINISHED), None
        if self._killed:
            return JobState.STOPPED, "was ended on request before it had saved"
        return JobState.FAILED, group.cause()

    def _conclude(self, state: JobState, reason: str | None, group: RankGroup | None = None) -> bool:
        """Leaves the ending in `exit.json`, then in the store; always False, as a job that ended goes no further."""
        ending = Ending(
            state=state,
            ended=time.time(),
            error=reason,
            output_path=self._data.exported(self._job.id),
            ranks=group.endings() if group else (),
        )
        try:
            write_ending(self._paths.exit_file, ending)
        except OSError as error:
            note(f"writing {self._paths.exit_file}: {error}")
        for _ in range(STORE_TRIES):
            with tolerated("recording the end"):
                if self._control.transition(self._job.id, state, **ending.fields()):
                    self._control.add_event(self._job.id, str(state), reason or str(state), _level(state))
                return False
            time.sleep(1)
        return False


def _level(state: JobState) -> str:
    return "error" if state == JobState.FAILED else "info"


def _record_gpus(data: DataDir, job: Job) -> Callable[[], object] | None:
    """Stores GPU samples while the job runs, also when no app does; whatever fails here never touches the job."""
    try:
        from sae_tui.jobs.recording import record

        return record(data, job)
    except Exception as error:
        note(f"GPU samples are not recorded: {error!r}")
        return None


def main(arguments: Sequence[str], command: RankCommand = rank_command) -> int:
    """Returns in the first process once the supervisor is registered (0) or could not be (1); never in the second."""
    root, job_id = arguments
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return 0 if os.read(reading, 1) else 1
    os.close(reading)
    try:
        supervisor = Supervisor(DataDir(Path(root)), int(job_id), command)
        supervisor.register()
        os.write(writing, b".")
        os.close(writing)
        supervisor.run()
    except UserError as error:
        note(str(error))
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        # A sampling thread may hang in the driver, and would keep the process from ending.
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
