"""Decides which queued jobs on this host may start now, based on the store, the locks and a reading of the GPUs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from sae_tui.jobs.gpus.availability import holders, with_other_users
from sae_tui.jobs.gpus.locks import lock_folder
from sae_tui.jobs.machine import SIGN_EVERY_S
from sae_tui.jobs.queue.after import describe_unfinished
from sae_tui.jobs.queue.fair import NOTHING_USED, Standing, read_standing
from sae_tui.jobs.queue.gpu_reader import FRESH_S, GpuReader, gpus, named_gpus
from sae_tui.jobs.queue.order import QueueGpu, Turn, turns
from sae_tui.jobs.reconcile import is_attended, is_supervised, reconcile
from sae_tui.jobs.supervisor_log import note, tolerate
from trainer.contract.paths import DataDir
from trainer.contract.process import state_of
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

# A job that may start is checked against a reading of the GPUs that is at most this old.
JUST_NOW_S = 1.0
# A supervisor is regarded as silent if it could start its job, but has not done so for this long.
SILENT_AFTER_S = 30.0
# The states of a process halted by a signal or a debugger, or waiting for a disk.
_HALTED = ("T", "t", "D")


class QueuePlan:
    """Plans this host's queue for jobs with the same GPU source.

    The plan remembers since when other jobs could have started, so use the same plan for several rounds.
    """

    def __init__(self, data: DataDir, control: Control, host: str, source: str) -> None:
        self._data, self._control, self.host = data, control, host
        self._folder = lock_folder(data, source)
        self._reader = GpuReader(data, source) if source != "none" else None
        self._passed_over: frozenset[int] = frozenset()
        # By job id: the time at which each other job could first have started, and skipped jobs' rows.
        self._could_since: dict[int, float] = {}
        self._silent: dict[int, Job] = {}
        # The number of other jobs that were in the queue in the last round.
        self.n_others = 0
        # Whether a new reading of the GPUs could let a job start, and the last reading that was compared.
        self._is_reading_useful = False
        self._compared: object = None
        self._standing: Standing = NOTHING_USED

    def turns(self, jobs: Collection[Job], all_active: Sequence[Job] | None = None) -> dict[int, Turn]:
        """Return the turn of each of these jobs, which must be waiting only for their GPUs.

        `all_active` contains the active jobs if the caller has just read them. The GPUs are read again only if that may
        let a job start.
        """
        active = self._active(all_active)
        others = self._others(jobs, active)
        if not any(job.gpus_wanted for job in jobs):
            return self._decide(jobs, others, active, [])
        self._is_reading_useful = self._reader is None or self._may_start(jobs, others, active)
        if not self._is_reading_useful:
            return self._decide(jobs, others, active, self._gpus(jobs, active, math.inf))
        planned = self._decide(jobs, others, active, self._gpus(jobs, active, FRESH_S))
        if any(turn.gpus for turn in planned.values()):
            # The rows may have changed while the GPUs were read.
            active = self._active(None)
            planned = self._decide(jobs, self._others(jobs, active), active, self._gpus(jobs, active, JUST_NOW_S))
        return planned

    def has_changed(self) -> bool:
        """Return whether a new reading of the GPUs differs from the last one in anything that the queue depends on."""
        if self._reader is None or not self._is_reading_useful:
            return False
        before, self._compared = (
            self._compared,
            [
                (one.uuid, one.healthy, one.obstacle, (one.memory_used_bytes or 0) >> 27, len(one.processes or ()))
                for one in self._reader.samples(FRESH_S)
            ],
        )
        return self._compared != before

    def _active(self, jobs: Sequence[Job] | None) -> dict[int, Job]:
        active = {job.id: job for job in jobs or self._control.active_jobs() if job.host == self.host}
        if self._control.unreadable != self._passed_over:
            self._passed_over = self._control.unreadable
            note(self._control.problem or "every row of the job list can be read again")
        return active

    def _others(self, jobs: Collection[Job], active: Mapping[int, Job]) -> list[Job]:
        """Return the other jobs that wait only for their GPUs."""
        own, attended = {job.id for job in jobs}, dict[str, bool]()
        others = [job for job in active.values() if job.id not in own and self._is_in_line(job, attended)]
        self.n_others = len(others)
        return others

    def _is_in_line(self, job: Job, attended: dict[str, bool]) -> bool:
        if job.state != JobState.QUEUED or job.held or not (job.gpus_wanted or job.queue_limit):
            return False
        if job.user not in attended:
            attended[job.user] = is_attended(self._data, job)
        is_alive = attended[job.user] or is_supervised(self._data, job)
        return is_alive and not describe_unfinished(self._data, self._control, job)

    def _may_start(self, jobs: Collection[Job], others: Sequence[Job], active: Mapping[int, Job]) -> bool:
        """Return whether one of the jobs could start if neither other users nor the driver were in the way."""
        known = self._gpus(jobs, active, math.inf)
        if not known:
            return True
        self._standing = self._read_standing(active, known)
        planned = turns([*jobs, *others], map(_at_best, known), time.time(), self._standing)
        return any(planned[job.id].gpus for job in jobs)

    def next_after(self, ending: Collection[int], jobs: Collection[Job], all_active: Sequence[Job]) -> Job | None:
        """Return the first of these waiting jobs that starts once the jobs in `ending` have ended, or None."""
        active = {job_id: job for job_id, job in self._active(all_active).items() if job_id not in ending}
        known = [_without(gpu, ending) for gpu in self._gpus(jobs, active, math.inf)]
        standing = self._read_standing(active, known)
        leases = tuple(lease for lease in standing.leases if lease.job_id not in ending)
        standing = msgspec.structs.replace(standing, leases=leases)
        planned = turns([*jobs, *self._others(jobs, active)], map(_at_best, known), time.time(), standing)
        by_id = {job.id: job for job in jobs}
        return next((by_id[one] for one, turn in planned.items() if one in by_id and not turn.waits_for), None)

    def most_gpus(self, user: str) -> int | None:
        """Return how many GPUs a user's jobs may hold according to the last plan, or None if there is no limit."""
        return self._standing.most_gpus(user)

    def _read_standing(self, active: Mapping[int, Job], seen: Iterable[QueueGpu]) -> Standing:
        unleased = [gpu.uuid for gpu in seen if not gpu.leases]
        return read_standing(self._data, self._control, self.host, active.values(), unleased, self._folder, time.time())

    def _decide(
        self, jobs: Collection[Job], others: Sequence[Job], active: Mapping[int, Job], seen: Sequence[QueueGpu]
    ) -> dict[int, Turn]:
        if not seen and self._reader and self._reader.problem:
            waits = Turn(waits_for=f"the GPUs cannot be read: {self._reader.problem}")
            return {job.id: waits if job.gpus_wanted else Turn() for job in jobs}
        moving = [job for job in others if self._silent.get(job.id) != job]
        self._standing = self._read_standing(active, seen)
        planned = turns([*jobs, *moving], seen, time.time(), self._standing)
        self._pass_over_silent([job for job in moving if planned[job.id].gpus])
        for job in others:
            if self._silent.get(job.id) == job:
                self._report_silent(job)
        return {job.id: planned[job.id] for job in jobs}

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
        who = f"its supervisor (pid {job.supervisor_pid})" if job.supervisor_pid else f"the queue process of {job.user}"
        words = f"{who} does not respond; other jobs go first"
        if job.waits_for == words:
            return
        self._control.update(job.id, waits_for=words)
        self._control.add_event(job.id, "silent", f"is skipped in the queue: {words}", "warning")
        self._silent[job.id] = self._control.job(job.id)

    def report_halted(self) -> None:
        """Record which skipped jobs' supervisors are halted or hung; called when another job starts before them.

        A supervisor may have sent a heartbeat just before it was halted. `report_silent` later reports supervisors that
        no longer send heartbeats.
        """
        with tolerate("reporting supervisors that do not respond"):
            for job in tuple(self._silent.values()):
                supervisor = job.supervisor
                if supervisor and supervisor.is_alive() and state_of(supervisor.pid) in _HALTED:
                    self._tell_silent(job)

    def report_silent(self) -> None:
        """Record which skipped jobs' supervisors are sending no heartbeats; also called after a job has started."""
        if not self._silent:
            return
        with tolerate("reporting supervisors that do not respond"):
            now = {job.id: job for job in self._control.active_jobs()}
            self._silent = {job.id: job for job in self._silent.values() if now.get(job.id) == job}
            for job in tuple(self._silent.values()):
                self._report_silent(job)

    def _gave_sign(self, job: Job) -> bool:
        file = self._data.run(job.id).lock_file if job.supervisor else self._data.queue_lock(job.host, job.user)
        with contextlib.suppress(OSError):
            return abs(time.time() - file.stat().st_mtime) < 2 * SIGN_EVERY_S
        return False

    def _gpus(self, jobs: Collection[Job], active: Mapping[int, Job], fresh_s: float) -> list[QueueGpu]:
        leases = [lease for lease in self._control.leases() if lease.host == self.host]
        holding = [active[lease.job_id] for lease in leases if lease.job_id in active]
        if any(job.supervisor and not is_supervised(self._data, job) for job in holding):
            # Correct the row here: there may be no other process to detect that the lease's holder has died.
            reconcile(self._data)
        if self._reader is None:
            return named_gpus(jobs, leases, active)
        samples = self._reader.samples(fresh_s)
        ranks = [rank for lease in leases for rank in self._control.ranks(lease.job_id)]
        held = with_other_users(holders(active.values(), leases, ranks), self._folder, samples)
        return gpus(samples, held, leases, active)


def _at_best(gpu: QueueGpu) -> QueueGpu:
    """Return a GPU as it would be if neither other users nor the driver were in the way."""
    return msgspec.structs.replace(gpu, unusable="", other_user="", free_bytes=2**62)


def _without(gpu: QueueGpu, ended: Collection[int]) -> QueueGpu:
    """Return a GPU as it will be after these jobs have ended."""
    return msgspec.structs.replace(gpu, leases=tuple(lease for lease in gpu.leases if lease.job_id not in ended))
