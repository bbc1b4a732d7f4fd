"""A queued job: checks whether the job may use its GPUs, and then acquires their locks and leases."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from sae_tui.jobs.gpus.locks import GpuLocks, lock_folder, lock_holders, owner
from sae_tui.jobs.queue.after import describe_unfinished
from sae_tui.jobs.queue.order import QueueGpu
from sae_tui.jobs.queue.plan import QueuePlan
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.states import describe_state
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control, LeaseConflict
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

# The pause between two checks, per queued job, and its maximum. A check takes about 0.1 ms per queued job.
PAUSE_EACH_S, LONGEST_PAUSE_S = 0.1, 10.0
# A reason for waiting is not recorded again within this many seconds.
RECORDED_FOR_S = 600.0
# The number of recorded reasons above which old ones are forgotten.
MOST_RECORDED = 2000


class Reasons:
    """Records in a job's row why it waits, and adds an event when the kind of reason changes."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._recorded_at: dict[tuple[int, str], float] = {}

    def record_all(self, reasons: Iterable[tuple[Job, str]]) -> None:
        """Record the jobs' reasons in one transaction; skip jobs whose row already has the reason."""
        changed = [(job, reason) for job, reason in reasons if reason and reason != job.waits_for]
        waits = [(job.id, reason, self._is_news(job, reason)) for job, reason in changed]
        if waits:
            self._control.record_waits(waits)

    def _is_news(self, job: Job, reason: str) -> bool:
        """Return whether the reason for waiting is new and was not recorded in the last `RECORDED_FOR_S` seconds.

        The limit is necessary because the processes on a GPU may change every minute, and a job may wait for a month.
        """
        now, key = time.monotonic(), (job.id, _kind(reason))
        if key[1] == _kind(job.waits_for or "") or now - self._recorded_at.get(key, -RECORDED_FOR_S) < RECORDED_FOR_S:
            return False
        if len(self._recorded_at) > MOST_RECORDED:
            self._recorded_at = {other: at for other, at in self._recorded_at.items() if now - at < RECORDED_FOR_S}
        self._recorded_at[key] = now
        return True


class QueueEntry:
    """A job's entry in the queue; `job` is its last known row, and `locks` contains its GPUs' locks."""

    def __init__(self, data: DataDir, control: Control, job: Job, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Enter the queue; `is_ready` is called before locks are acquired, and may restart this program."""
        self._data, self._control = data, control
        self.job = job
        self.locks = GpuLocks(data.locks, ())
        self._folder = lock_folder(data, job.gpu_source)
        self._is_ready = is_ready
        self._again_at = 0.0
        self._reasons = Reasons(control)
        self._plan = QueuePlan(data, control, job.host, job.gpu_source)
        # The store's version, and the queue's fingerprint at that version.
        self._version: tuple[int, int] | None = None
        self._queue = ""

    def has_news(self) -> bool:
        """Return whether the queue has changed since the last call; if so, the next `try_start` checks the turn."""
        version, before = self._control.version(), self._queue
        if version != self._version:
            self._version, self._queue = version, self._control.fingerprint()
        if self._queue == before:
            return False
        self._again_at = 0.0
        return True

    def try_start(self) -> bool:
        """Acquire all the job's GPUs and set its state to `starting`, or record in its row why it is waiting.

        Return whether the job starts. The more jobs are queued, the less often each one checks its turn, so the total
        load stays constant.
        """
        if time.monotonic() < self._again_at:
            return False
        self.job = self._control.job(self.job.id)
        if self.job.state != JobState.QUEUED:
            return False
        reason = self._try_take_gpus()
        self._reasons.record_all([(self.job, reason)])
        if not reason:
            self._plan.report_halted()
        return not reason

    def report_silent(self) -> None:
        """Record which skipped jobs' supervisors are sending no heartbeats; also called after this job has started."""
        self._plan.report_silent()

    def _try_take_gpus(self) -> str:
        """Acquire the locks, then the leases; return why this failed, or "" if the GPUs are acquired.

        The locks come first because they are correct even after a crash.
        """
        if reason := obstacle_of(self._data, self._control, self.job):
            return reason
        turn = self._plan.turns([self.job])[self.job.id]
        self._again_at = time.monotonic() + min(LONGEST_PAUSE_S, self._plan.n_others * PAUSE_EACH_S)
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
            # If the job does not start, always release the locks, because they would block the next attempt.
            if self.job.state == JobState.STARTING:
                self.locks = locks
            else:
                locks.release()

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
            if not self._control.lease(self.job, gpus, capacity, self._plan.most_gpus(self.job.user), **fields):
                return "it is no longer queued"
        except LeaseConflict as conflict:
            # The GPU's lock was free, so the supervisor and ranks of the job that holds the lease have exited.
            # Correct that job's row.
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


def obstacle_of(data: DataDir, control: Control, job: Job) -> str:
    """Return why a job must not be considered for GPUs yet (it is held or comes after unfinished jobs), or ""."""
    held = describe_state(job).word if job.held else ""
    return "; ".join(filter(None, (held, describe_unfinished(data, control, job))))


def _kind(obstacle: str) -> str:
    """Return a reason for waiting without the parts that change often: numbers and text in brackets.

    For example, the amount of free memory and other users' processes change often.
    """
    return re.sub(r"\(.*\)|[\d.,]+", "", obstacle)
