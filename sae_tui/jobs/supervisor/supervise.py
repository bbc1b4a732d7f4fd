"""A job's supervisor: acquires the GPUs, runs and restarts the ranks, and records how the job ends.

`python -m sae_tui.jobs.supervisor.supervise DATA_DIR JOB_ID` forks a supervisor into the background. The queue process
starts it when the job's turn comes.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from sae_tui.jobs.background import go_on
from sae_tui.jobs.ending import JobEnding, write_ending
from sae_tui.jobs.files import is_gone
from sae_tui.jobs.gpus.locks import GpuLocks, lock_folder
from sae_tui.jobs.launchers.early_ranks import EarlyRanks
from sae_tui.jobs.machine import this_machine
from sae_tui.jobs.mending import running_program
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.program_environment import ProgramEnvironment
from sae_tui.jobs.queue.waiting_job import QueueEntry
from sae_tui.jobs.reconcile import is_attended
from sae_tui.jobs.record import as_recorded, write_record
from sae_tui.jobs.supervisor.conclude import conclude
from sae_tui.jobs.supervisor.sign import Sign
from sae_tui.jobs.supervisor.signals import Orders, end_descendants
from sae_tui.jobs.supervisor.upgrade import Installed
from sae_tui.jobs.supervisor_log import note, retry, tolerate, tolerate_disk
from trainer.contract.errors import UserError
from trainer.contract.locks import FileLock
from trainer.contract.paths import DataDir, umask_of
from trainer.contract.prctl import become_subreaper
from trainer.contract.process import STOP_SIGNALS, ProcessRef
from trainer.contract.runs.lock import RunLock
from trainer.contract.runs.rank_spec import RankSpec, rank_command
from trainer.contract.settings.toml import table_of
from trainer.contract.store.job_store import ENDING, Control, RequestKind
from trainer.contract.store.states import JobState

if TYPE_CHECKING:
    from sae_tui.jobs.launchers.base import RankCommand
    from sae_tui.jobs.supervisor.attempt import AttemptRunner, Outcome

# The time between two checks of the store, also after ranks were started early, and between two checks of the turn.
TICK_S, EARLY_TICK_S, TRY_EVERY_S = 0.25, 0.05, 1.0
# The delay before the second restart. The first restart is immediate, and the delay doubles with each later restart.
RESTART_AFTER_S = 5.0
LONGEST_DELAY_S = 60.0
# The delay before a command is queued again at its own request, so that a command that always asks for it costs little.
REQUEUED_AFTER_S = 5.0
# How long a supervisor waits in the queue, which is long enough to skip another supervisor that does not respond. With
# ranks that were started early, it waits longer, because a running job may evaluate its SAE for minutes at its end.
LEAVES_AFTER_S, EARLY_LEAVES_AFTER_S = 60.0, 300.0


T = TypeVar("T")


class Supervisor:
    """Controls a job from `queued` to its end."""

    def __init__(self, data: DataDir, job_id: int, command: RankCommand = rank_command) -> None:
        self._data = data
        self._paths = data.run(job_id)
        self._control = Control(data.control_db)
        self._store = self._control.version()[0]
        self._job = self._control.job(job_id)
        self._command = command
        self._installed = Installed()
        self._line = QueueEntry(data, self._control, self._job, self._installed.restart_if_replaced)
        self._is_waiting, self._has_ended = True, False
        # Whether the job was queued again and left to the queue process.
        self._is_left = False
        self._orders = Orders()
        self._sign = Sign(self._control, job_id, self._paths, lambda: self._line.report_silent())
        self._lock: RunLock | None = None
        self._alone = FileLock(self._paths.supervisor_lock)
        # Whether the current attempt's program is already running.
        self._attaches = False
        self._early, self._has_started_early = EarlyRanks(), False

    def register(self) -> None:
        """Record this process in the job's row and install handlers for termination signals.

        Raise `UserError` if a process from an earlier attempt is still alive.
        """
        if stored := ProgramEnvironment.read(self._paths):
            stored.apply_limits()
        os.umask(umask_of(self._data.root))
        if not _is_alone(self._alone):
            raise UserError(f"job {self._job.id} has another supervisor")
        self._attaches = self._job.state != JobState.QUEUED and bool(
            running_program(self._data, self._control, self._job)
        )
        if self._attaches:
            # The program may hold these locks itself, unless it was adopted.
            self._line.locks = GpuLocks(lock_folder(self._data, self._job.gpu_source), self._job.gpu_uuids)
            self._line.locks.take()
        self._lock = RunLock(self._paths.root, shared=self._attaches)
        self._lock.share()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._orders.end())
        for number in STOP_SIGNALS - {signal.SIGTERM}:
            signal.signal(number, lambda *_: self._orders.stop())
        become_subreaper()
        me = ProcessRef.current()
        # The host name may have changed since the launch if a container was recreated or a machine was renamed.
        fields = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, **this_machine()}
        self._control.update(self._job.id, **fields)
        self._job = msgspec.structs.replace(self._job, **fields)
        write_record(self._paths, self._job)

    def run(self) -> None:
        """Run the job from the queue to its end; return once all the job's processes have exited.

        If the supervisor itself fails, record the error as the reason for the job's failure, then re-raise it.
        """
        try:
            self._run()
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._early.end()

    def _run(self) -> None:
        has_started = self._attaches
        while has_started or (not self._is_left and self._wait_for_gpus()):
            has_started = False
            outcome = self._run_ranks()
            ending: JobEnding | None = outcome.ending
            if outcome.paused:
                ending = self._queue_again(outcome.ending, held=True)
            elif outcome.requeued and self._wait_undisturbed(REQUEUED_AFTER_S):
                ending = self._queue_again(outcome.ending, held=False)
            if ending:
                self._conclude(ending)
                return

    def _wait_for_gpus(self) -> bool:
        """Wait in the queue; return True once the locks and leases are acquired, or False if the job ends first.

        If this takes too long, or if the job is held, also return False, so that the queue process manages the job
        instead.
        """
        self._is_waiting, began = True, time.monotonic()
        try_at = 0.0
        while True:
            self._sign.turn()
            with tolerate("waiting for GPUs"), tolerate_disk("waiting for GPUs"):
                if self._is_over():
                    return False
                if time.monotonic() >= try_at or (self._early and self._line.has_news()):
                    try_at = time.monotonic() + TRY_EVERY_S
                    self._start_ranks_early()
                    if self._line.try_start():
                        self._job = self._line.job
                        self._is_waiting = False
                        write_record(self._paths, self._job)
                        return True
            if self._orders.to_end_since:
                # Even if the store cannot be read, `_conclude` can record how the job ended in the run folder.
                self._conclude(JobEnding(state=JobState.STOPPED, ended=time.time()))
                return False
            is_late = time.monotonic() - began > (EARLY_LEAVES_AFTER_S if self._early else LEAVES_AFTER_S)
            if (is_late or self._line.job.held) and is_attended(self._data, self._job):
                return False
            time.sleep(EARLY_TICK_S if self._early else TICK_S)

    def _start_ranks_early(self) -> None:
        """Start the ranks of a training job that does not have its GPUs yet, so that they import torch meanwhile.

        Even if the GPUs are free, the ranks then import torch while this process takes the GPUs, in 0.15 s.
        """
        job = self._line.job
        launch = table_of(job.config).get("launch")
        is_other = job.backend != "local" or (isinstance(launch, dict) and launch.get("python"))
        if self._has_started_early or job.held or is_other or not kind_of(job.config).trains:
            return
        self._has_started_early = True
        # In the middle of an upgrade, modules may be missing.
        if not self._installed.is_current():
            return
        from trainer.contract.planning.workload import ONE_PROCESS

        spec = RankSpec(
            run_dir=self._paths.root, output_dir=self._data.sae(job.id), attempt=job.attempt + 1,
            world_size=job.world_size, device=job.device, box_file=self._data.box_file,
            as_one_process=job.mode in ONE_PROCESS,
        )  # fmt: skip
        self._early.start(spec, self._command)
        if self._early:
            # Also load this large module now, which supervisors of other waiting jobs do without.
            pkgutil.resolve_name(kind_of(job.config).runner)

    def _fail(self, error: Exception) -> None:
        """Stop all ranks, record that the supervisor failed, and run the user's command, unless the job has ended."""
        if self._has_ended:
            return
        # If the package was replaced, mixing modules from two versions may have caused the error. A restart avoids
        # this.
        if self._is_waiting:
            self._installed.restart_if_replaced()
        end_descendants()
        what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        reason = f"sae-tui itself failed: {what}; see {self._paths.supervisor_log}"
        ending = JobEnding(state=JobState.FAILED, ended=time.time(), error=reason)
        try:
            self._conclude(ending)
        except Exception as second:
            note(f"recording the failure: {second!r}")
            with tolerate("recording the failure"):
                self._control.transition(self._job.id, ending.state, **ending.fields())

    def _is_over(self) -> bool:
        """Return whether a queued job must stop waiting; if so, record how the job ended."""
        if self._is_without_data():
            return True
        if self._control.version()[0] != self._store:
            self._control.restore(as_recorded(self._paths, self._job))
            self._store = self._control.version()[0]
        if self._control.state(self._job.id) != JobState.QUEUED:
            return True
        requests = self._control.open_requests(self._job.id) & ENDING
        if "pause" in requests:
            self._control.update(self._job.id, held=True)
            self._control.answer(self._job.id, "pause")
        if self._orders.to_end_since or (requests - {"pause"} and self._installed.may_end()):
            self._conclude(JobEnding(state=JobState.STOPPED, ended=time.time()))
            return True
        if is_gone(self._paths.root):
            self._conclude(JobEnding(state=JobState.FAILED, ended=time.time(), error="its run folder was deleted"))
            return True
        return False

    def _run_ranks(self) -> Outcome:
        """Run attempts until one does not crash or must not be restarted; return the last attempt's outcome."""
        # The package may be replaced while the job is running, so import all modules now.
        for name in ("sae_tui.jobs.known_failures", "sae_tui.jobs.supervisor.end_hook"):
            importlib.import_module(name)
        self._runner: type[AttemptRunner] = pkgutil.resolve_name(kind_of(self._job.config).runner)
        while True:
            own = [self._lock.descriptor] if self._lock and self._lock.descriptor >= 0 else []
            locks = (*self._line.locks.descriptors, *own)
            attempt: AttemptRunner = self._runner(
                self._data, self._control, self._job, self._orders, locks, self._command, self._sign, self._early
            )
            outcome = attempt.run()
            end_descendants()
            if is_gone(self._data.root):
                return outcome  # `_conclude` logs this.
            with tolerate_disk(f"writing how attempt {self._job.attempt} ended"):
                write_ending(self._paths.attempt(self._job.attempt) / "exit.json", outcome.ending)
            if not outcome.crashed:
                return outcome
            if not self._prepare_restart(outcome.ending.error or ""):
                return self._apply_requests(outcome)

    def _apply_requests(self, crash: Outcome) -> Outcome:
        """Turn the outcome of a crash into a stop or pause if one was requested before the restart."""
        asked: set[RequestKind] = set()
        with tolerate("checking for requests"):
            asked = self._control.open_requests(self._job.id) & ENDING
        if not (asked or self._orders.to_end_since):
            return crash
        reason = f"was asked to end after a crash: {crash.ending.error}"
        ending = msgspec.structs.replace(crash.ending, state=JobState.STOPPED, error=reason)
        return msgspec.structs.replace(crash, ending=ending, paused=asked == {"pause"})

    def _prepare_restart(self, error: str) -> bool:
        """Wait, then prepare the job for another attempt; return False if no further attempt is allowed."""
        from sae_tui.jobs.known_failures import remedy

        cause, made = remedy(error), self._job.restarts
        if made >= self._job.max_restarts:
            return False
        if cause and not cause.may_repeat and self._runner.knows_failures:
            self._tell(
                "not-restarted", f"was not restarted, because it would fail in the same way: {cause.text}", "warning"
            )
            return False
        delay_s = min(LONGEST_DELAY_S, RESTART_AFTER_S * 2 ** min(made - 1, 10)) if made else 0.0
        number = f"restart {made + 1} of {self._job.max_restarts}"
        self._tell("restarting", f"crashed: {error}; {number}" + (f" in {delay_s:.0f} s" if delay_s else ""), "warning")
        if not self._wait_undisturbed(delay_s):
            return False
        fields: dict[str, Any] = {"attempt": self._job.attempt + 1, "restarts": made + 1}
        try:
            if not self._retry(
                "restarting", lambda: self._control.transition(self._job.id, JobState.STARTING, **fields)
            ):
                return False
        except UserError as reason:
            why = f"because the restart could not be recorded: {reason}"
            self._tell("not-restarted", f"was not restarted, {why}", "warning")
            return False
        self._job = msgspec.structs.replace(self._job, state=JobState.STARTING, **fields)
        write_record(self._paths, self._job)
        return True

    def _wait_undisturbed(self, delay_s: float) -> bool:
        """Wait `delay_s` seconds before the next attempt; if the job is asked to stop in the meantime, return False."""
        until = time.monotonic() + delay_s
        while True:
            with tolerate("waiting to restart"):
                if self._orders.to_end_since or self._control.open_requests(self._job.id) & ENDING:
                    return False
            if time.monotonic() >= until:
                return True
            time.sleep(TICK_S)

    def _queue_again(self, ending: JobEnding, *, held: bool) -> JobEnding | None:
        """Put the job back in the queue, where it may be held, and free its GPUs for other jobs.

        Return None if the job is queued. If the job must stop instead, or if this cannot be recorded, return how the
        job ends.
        """
        fields: dict[str, Any] = {"held": held, "restarts": 0}
        if self._job.any_gpus:
            fields |= {"gpu_ids": (), "gpu_uuids": ()}
        try:
            if not self._retry("queueing it again", lambda: self._move_to_queue(fields)):
                return ending
        except UserError as error:
            return msgspec.structs.replace(ending, error=f"could not be queued again, so it is stopped: {error}")
        self._job = msgspec.structs.replace(self._job, state=JobState.QUEUED, **fields)
        with tolerate("reporting that it is queued again"):
            self._retry("reporting that it is queued again", lambda: self._tell_queued(ending, held=held))
        self._line.locks.release()
        self._line = QueueEntry(self._data, self._control, self._job, self._installed.restart_if_replaced)
        write_record(self._paths, self._job)
        self._is_left = is_attended(self._data, self._job)
        if self._is_left:
            self._let_go()
        return None

    def _move_to_queue(self, fields: dict[str, Any]) -> bool:
        """Move the job from its current state to the queue; return False if the job must stop instead."""
        # Record the state `stopping` first, in case the store was unavailable when the pause was requested.
        self._control.transition(self._job.id, JobState.STOPPING)
        unless: tuple[RequestKind, ...] = ("stop", "kill")
        return self._control.transition(self._job.id, JobState.QUEUED, unless=unless, **fields)

    def _tell_queued(self, ending: JobEnding, *, held: bool) -> None:
        self._job = self._control.job(self._job.id)
        if held:
            resumes = self._job.step and not kind_of(self._job.config).is_program
            step = f" at step {self._job.step}" if resumes else ""
            self._control.add_event(self._job.id, "paused", f"is paused{step}")
        else:
            self._control.add_event(self._job.id, "requeued", f"is queued again: {ending.error}")

    def _conclude(self, ending: JobEnding) -> None:
        """Record how the job ended, then run the user's command; after this, the job may be resumed or deleted."""
        if self._is_without_data():
            return
        with tolerate("recording the end"):
            final = self._retry(
                "recording the end", lambda: conclude(self._data, self._control, self._job, ending, self._let_go)
            )
            if final:
                self._job, self._has_ended = final, True
                self._run_hook()

    def _is_without_data(self) -> bool:
        """Return whether the data folder is gone, so that there is nowhere to record how the job ended; log this once.

        If the folder was moved, the next command that uses it starts a new supervisor.
        """
        if not is_gone(self._data.root):
            return False
        if not self._has_ended:
            self._has_ended = True
            note(f"exits, because {self._data.root} no longer exists")
        return True

    def _retry(self, action: str, attempt: Callable[[], T]) -> T:
        return retry(action, attempt, is_useless=lambda: is_gone(self._data.root))

    def _let_go(self) -> None:
        """Release the GPUs and the run, so that other jobs and supervisors may take them while this one exits."""
        self._early.end()
        self._line.locks.release()
        self._alone.release()
        if self._lock:
            self._lock.release()

    def _run_hook(self) -> None:
        # Import the module here because it is needed only at the end.
        from sae_tui.jobs.supervisor.end_hook import run_hook

        run_hook(self._data, self._job)

    def _tell(self, kind: str, message: str, level: str) -> None:
        with tolerate(message):
            self._control.add_event(self._job.id, kind, message, level)


def _is_alone(lock: FileLock) -> bool:
    """Acquire a job's supervisor lock; return False if another supervisor holds it."""
    try:
        return lock.acquire()
    except UserError as error:
        # Training must also work on a file system without locks.
        note(str(error))
        return True


def main(arguments: Sequence[str], command: RankCommand = rank_command) -> int:
    """Fork the supervisor; in the parent, return 0 once the supervisor has registered itself, or 1 if it fails.

    This function never returns in the child.
    """
    root, job_id = arguments

    def begin() -> Callable[[], None]:
        supervisor = Supervisor(DataDir(Path(root)), int(job_id), command)
        supervisor.register()
        return supervisor.run

    return go_on(begin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
