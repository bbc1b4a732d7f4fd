"""The line for GPUs: who may start now, and what the others wait for."""

from __future__ import annotations

import time

import msgspec

from sae_tui.jobs.locks import GpuLocks
from sae_tui.jobs.reconcile import reconcile
from trainer.contract.control import Control, Job, LeaseConflict
from trainer.contract.paths import DataDir
from trainer.contract.states import JobState


class Line:
    """One queued job's place in it; `job` is its row, kept up to date without reading it again."""

    def __init__(self, data: DataDir, control: Control, job: Job, locks: GpuLocks) -> None:
        self._data = data
        self._control = control
        self.job = job
        self._locks = locks
        self._told = ""

    def try_start(self) -> bool:
        """Takes all GPUs of the job and moves it to `starting`, or says in an event what it waits for."""
        obstacle = self._obstacle()
        if obstacle and obstacle != self._told:
            self._control.add_event(self.job.id, "waiting", f"waits: {obstacle}")
            self._told = obstacle
        return not obstacle

    def _obstacle(self) -> str:
        """Nothing where the job has got its GPUs; the locks come first, since they are true even after a crash."""
        if older := self._older_that_can_start():
            return f"job {older.id} was there first"
        if not self._locks.take():
            return self._holders()
        try:
            return self._lease()
        finally:
            # On any way but success, a store that is locked included: the next try shall not meet our own locks.
            if self.job.state != JobState.STARTING:
                self._locks.release()

    def _lease(self) -> str:
        fields = {"attempt": self.job.attempt + 1, "started": time.time()}
        gpus = list(zip(self.job.gpu_ids, self.job.gpu_uuids, strict=True))
        try:
            if not self._control.lease(self.job, gpus, **fields):
                return "it is not queued any more"
        except LeaseConflict as conflict:
            # The holder's lock is free, so its supervisor and ranks are gone: its row has to be mended.
            reconcile(self._data)
            return str(conflict)
        self.job = msgspec.structs.replace(self.job, state=JobState.STARTING, **fields)
        return ""

    def _older_that_can_start(self) -> Job | None:
        """An older job in line for one of our GPUs that nothing else holds up."""
        leased = {lease.gpu_uuid for lease in self._control.leases() if lease.host == self.job.host}
        for other in reversed(self._control.jobs([JobState.QUEUED])):
            wanted = set(other.gpu_uuids)
            ahead = other.id < self.job.id and other.host == self.job.host and wanted & set(self.job.gpu_uuids)
            if ahead and not wanted & leased and other.supervisor and other.supervisor.is_alive():
                return other
        return None

    def _holders(self) -> str:
        held = [
            f"GPU {lease.gpu_index} is held by job {lease.job_id} ({lease.user})"
            for lease in self._control.leases()
            if lease.host == self.job.host and lease.gpu_uuid in self.job.gpu_uuids
        ]
        return "; ".join(held) or "a process of an earlier job still uses its GPUs"
