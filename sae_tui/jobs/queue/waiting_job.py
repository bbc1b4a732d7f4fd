"""A queued job: checks whether the job may use its GPUs, and then acquires their locks and leases."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence

import msgspec

from sae_tui.jobs.gpus.availability import holders, with_other_users
from sae_tui.jobs.gpus.locks import GpuLocks, lock_folder, lock_holders, owner
from sae_tui.jobs.machine import SIGN_EVERY_S
from sae_tui.jobs.queue.after import describe_unfinished
from sae_tui.jobs.queue.gpu_reader import FRESH_S, GpuReader, gpus, named_gpus
from sae_tui.jobs.queue.order import QueueGpu, Turn, turns
from sae_tui.jobs.reconcile import is_supervised, reconcile
from sae_tui.jobs.states import describe_state
from sae_tui.jobs.supervisor_log import note, tolerate
from trainer.contract.paths import DataDir
from trainer.contract.process import state_of
from trainer.contract.store.job_store import Control, LeaseConflict
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

# A job that may start rereads the GPUs unless the last reading is more recent than this.
JUST_NOW_S = 1.0
# A supervisor is regarded as silent if it could start its job, but has not done so for this long.
SILENT_AFTER_S = 30.0
# The states of a process halted by a signal or a debugger, or waiting for a disk.
_HALTED = ("T", "t", "D")
# The pause between two checks, per queued job, and its maximum. A check takes about 0.1 ms per queued job.
PAUSE_EACH_S, LONGEST_PAUSE_S = 0.1, 10.0
# A reason for waiting is not recorded again within this many seconds.
RECORDED_FOR_S = 600.0


class QueueEntry:
    """A job's entry in the queue; `job` is its last known row, and `locks` contains the locks of its GPUs."""

    def __init__(self, data: DataDir, control: Control, job: Job, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Enter the queue; `is_ready` is called before locks are acquired, and may restart this program."""
        self._data = data
        self._control = control
        self.job = job
        self.locks = GpuLocks(data.locks, ())
        self._folder = lock_folder(data, job.gpu_source)
        self._is_ready = is_ready
        self._again_at = 0.0
        self._recorded_at: dict[str, float] = {}
        self._passed_over: frozenset[int] = frozenset()
        # By job id: the time at which each other job could first have started, and skipped jobs' rows.
        self._could_since: dict[int, float] = {}
        self._silent: dict[int, Job] = {}
        self._reader = GpuReader(data, job.gpu_source) if job.gpu_source != "none" else None

    def try_start(self) -> bool:
        """Acquire all the job's GPUs and set its state to `starting`, or record in its row why it is waiting.

        Return whether the job starts. The more jobs are queued, the less often each one checks, so the total load stays
        constant.
        """
        if time.monotonic() < self._again_at:
            return False
        self.job = self._control.job(self.job.id)
        if self.job.state != JobState.QUEUED:
            return False
        reason = self._try_take_gpus()
        if reason and reason != self.job.waits_for:
            self._control.update(self.job.id, waits_for=reason)
            if self._is_news(_kind(reason), _kind(self.job.waits_for or "")):
                self._control.add_event(self.job.id, "waiting", f"waits: {reason}")
        if not reason:
            self._report_halted()
        return not reason

    def _is_news(self, kind: str, before: str) -> bool:
        """Return whether the reason for waiting is new and was not recorded in the last `RECORDED_FOR_S` seconds.

        The limit is necessary because the processes on a GPU may change every minute, and a job may wait for a month.
        """
        now = time.monotonic()
        if kind == before or now - self._recorded_at.get(kind, -RECORDED_FOR_S) < RECORDED_FOR_S:
            return False
        self._recorded_at = {other: at for other, at in self._recorded_at.items() if now - at < RECORDED_FOR_S} | {
            kind: now
        }
        return True

    def _try_take_gpus(self) -> str:
        """Acquire the locks, then the leases; return why this failed, or "" if the GPUs are acquired.

        The locks come first because they are correct even after a crash.
        """
        held = describe_state(self.job).word if self.job.held else ""
        if reason := "; ".join(filter(None, (held, describe_unfinished(self._data, self._control, self.job)))):
            return reason
        turn = self._turn()
        if turn.waits_for:
            return turn.waits_for
        if not self._is_ready():
            return "sae-tui is being upgraded"
        locks = GpuLocks(self._folder, [gpu.uuid for gpu in turn.gpus], shared=self.job.shares_gpus)
        if not locks.take():
            return self._lock_obstacle(turn.gpus, locks)
        try:
            return self._lease(turn.gpus)
        finally:
            # If the job does not start, always release the locks, which would block the next attempt.
            if self.job.state == JobState.STARTING:
                self.locks = locks
            else:
                locks.release()

    def _turn(self) -> Turn:
        """Return the GPUs that the job may use according to a recent reading, or what the job is waiting for."""
        if not self.job.gpus_wanted:
            return Turn()
        turn = self._plan(FRESH_S)
        return self._plan(JUST_NOW_S) if turn.gpus else turn

    def _plan(self, fresh_s: float) -> Turn:
        active = {job.id: job for job in self._control.active_jobs() if job.host == self.job.host}
        if self._control.unreadable != self._passed_over:
            self._passed_over = self._control.unreadable
            note(self._control.problem or "every row of the job list can be read again")
        others = [job for job in active.values() if job.id != self.job.id and self._is_in_line(job)]
        self._again_at = time.monotonic() + min(LONGEST_PAUSE_S, len(others) * PAUSE_EACH_S)
        seen = self._gpus(active, fresh_s)
        if not seen and self._reader and self._reader.problem:
            return Turn(waits_for=f"the GPUs cannot be read: {self._reader.problem}")
        moving = [job for job in others if self._silent.get(job.id) != job]
        planned = turns([self.job, *moving], seen, time.time())
        self._pass_over_silent([job for job in moving if planned[job.id].gpus])
        for job in others:
            if self._silent.get(job.id) == job:
                self._report_silent(job)
        return planned[self.job.id]

    def _pass_over_silent(self, could_start: Sequence[Job]) -> None:
        """Skip jobs that could have started 30 s ago but have not, until their rows change.

        The supervisors of these jobs are alive, but they are halted or hung, for example because a file server does
        not respond, or they cannot lock the GPUs.
        """
        now = time.monotonic()
        self._could_since = {job.id: self._could_since.get(job.id, now) for job in could_start}
        late = [job for job in could_start if now - self._could_since[job.id] >= SILENT_AFTER_S]
        self._silent |= {job.id: job for job in late}

    def _report_silent(self, job: Job) -> None:
        """Record that a skipped job's supervisor is not responding, unless it has recently sent a heartbeat."""
        if not self._gave_sign(job):
            self._tell_silent(job)

    def _tell_silent(self, job: Job) -> None:
        words = f"its supervisor (pid {job.supervisor_pid}) does not respond; other jobs go first"
        if job.waits_for == words:
            return
        self._control.update(job.id, waits_for=words)
        self._control.add_event(job.id, "silent", f"is skipped in the queue: {words}", "warning")
        self._silent[job.id] = self._control.job(job.id)

    def _report_halted(self) -> None:
        """Record which skipped jobs' supervisors are halted or hung, as this job starts before the skipped jobs.

        A supervisor may have sent a heartbeat just before it was halted. `report_silent` later reports supervisors that
        no longer send heartbeats.
        """
        with tolerate("reporting supervisors that do not respond"):
            for job in tuple(self._silent.values()):
                supervisor = job.supervisor
                if supervisor and supervisor.is_alive() and state_of(supervisor.pid) in _HALTED:
                    self._tell_silent(job)

    def report_silent(self) -> None:
        """Record which skipped jobs' supervisors are sending no heartbeats; also called after this job has started."""
        if not self._silent:
            return
        with tolerate("reporting supervisors that do not respond"):
            now = {job.id: job for job in self._control.active_jobs()}
            self._silent = {job.id: job for job in self._silent.values() if now.get(job.id) == job}
            for job in tuple(self._silent.values()):
                self._report_silent(job)

    def _gave_sign(self, job: Job) -> bool:
        with contextlib.suppress(OSError):
            return abs(time.time() - self._data.run(job.id).lock_file.stat().st_mtime) < 2 * SIGN_EVERY_S
        return False

    def _is_in_line(self, job: Job) -> bool:
        """Return whether another job in the queue waits only for its GPUs."""
        waits = job.state == JobState.QUEUED and not job.held and job.gpus_wanted > 0
        return waits and is_supervised(self._data, job) and not describe_unfinished(self._data, self._control, job)

    def _gpus(self, active: dict[int, Job], fresh_s: float) -> list[QueueGpu]:
        leases = [lease for lease in self._control.leases() if lease.host == self.job.host]
        holding = [active[lease.job_id] for lease in leases if lease.job_id in active]
        if any(job.supervisor and not is_supervised(self._data, job) for job in holding):
            # Correct the row here: there may be no other process to detect that the lease's holder has died.
            reconcile(self._data)
        if self._reader is None:
            return named_gpus(self.job, leases, active)
        samples = self._reader.samples(fresh_s)
        ranks = [rank for lease in leases for rank in self._control.ranks(lease.job_id)]
        held = with_other_users(holders(active.values(), leases, ranks), self._folder, samples)
        return gpus(samples, held, leases, active)

    def _lease(self, chosen: Sequence[QueueGpu]) -> str:
        gpus = [(gpu.index, gpu.uuid) for gpu in chosen]
        fields = {
            "attempt": self.job.attempt + 1,
            "started": time.time(),
            "gpu_ids": tuple(index for index, _ in gpus),
            "gpu_uuids": tuple(uuid for _, uuid in gpus),
            "waits_for": None,
        }
        try:
            capacity = {gpu.uuid: gpu.free_bytes for gpu in chosen if gpu.free_bytes is not None}
            if not self._control.lease(self.job, gpus, capacity, **fields):
                return "it is no longer queued"
        except LeaseConflict as conflict:
            # The GPU's lock was free, so the supervisor and ranks of the job holding the lease have exited.
            # Correct the row for the job holding the lease.
            reconcile(self._data)
            return str(conflict)
        self.job = msgspec.structs.replace(self.job, state=JobState.STARTING, **fields)
        return ""

    def _lock_obstacle(self, chosen: Sequence[QueueGpu], locks: GpuLocks) -> str:
        """Return which process locks a GPU without holding its lease, or why the lock cannot be acquired."""
        uuid = locks.refused or ""
        index = next((gpu.index for gpu in chosen if gpu.uuid == uuid), "?")
        if locks.why:
            return f"GPU {index} cannot be reserved: {locks.why}"
        pid = lock_holders(self._folder, [uuid]).get(uuid)
        return f"GPU {index} is held by {owner(pid)}" if pid else f"GPU {index} is held by a process that is ending"


def _kind(obstacle: str) -> str:
    """Return a reason for waiting without the parts that change often: numbers and text in brackets.

    For example, free memory and the processes of other users change often.
    """
    return re.sub(r"\(.*\)|[\d.,]+", "", obstacle)
