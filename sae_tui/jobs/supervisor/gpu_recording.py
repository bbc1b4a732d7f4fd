"""Stores GPU samples from a supervisor so that the history of a job's GPUs is complete even if no app is running."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable

from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.history import Recorder
from sae_tui.gpu.sampler import Sampler
from sae_tui.gpu.upkeep import Retention
from sae_tui.jobs.gpus.occupancy import Occupancy, gpu_source
from sae_tui.settings import load_settings
from trainer.contract.paths import DataDir
from trainer.contract.store.rows import Job

# How often to check for a driver error, which is part of the GPU's condition.
POLL_S = 0.2


class Recording:
    """Records samples from all GPUs, and faults on a job's GPUs.

    If another process on this host is elected to read the GPUs, this object records neither.
    """

    def __init__(self, recorder: Recorder, sampler: Sampler, uuids: Container[str]) -> None:
        self._recorder, self._sampler, self._uuids = recorder, sampler, uuids
        self._began = time.time()

    def stop(self) -> None:
        self._recorder.stop()
        self._sampler.stop()

    def faults(self, wait_s: float) -> list[str]:
        """Return the faults on the job's GPUs, such as `GPU 3: Xid 79: ...`; wait up to `wait_s` for the first fault.

        Return [] if another process is already polling the GPUs.
        """
        deadline = time.monotonic() + wait_s
        while self._sampler.count and not (found := self._found(self._sampler.latest())):
            if time.monotonic() > deadline:
                return []
            time.sleep(POLL_S)
        return found if self._sampler.count else []

    def _found(self, samples: Iterable[GpuSample]) -> list[str]:
        words = {sample.index: self._fault(sample) for sample in samples if sample.uuid in self._uuids}
        return [f"GPU {index}: {fault}" for index, fault in words.items() if fault]

    def _fault(self, sample: GpuSample) -> str:
        if not sample.healthy:
            return sample.reason
        xid = sample.condition.xid if sample.condition else None
        if xid and xid.timestamp >= self._began:
            return xid.words
        return sample.condition.trouble[0] if sample.condition else ""


def record(data: DataDir, job: Job) -> Recording | None:
    """Start recording GPU samples if this process is elected to do so; return None for a job without GPUs."""
    if not job.gpu_uuids:
        return None
    occupancy = Occupancy(data)
    settings, _ = load_settings(data.settings_file)
    sampler = Sampler(gpu_source(job.gpu_source, occupancy), settings.sampling_interval_s)
    retention = Retention(settings.history_hours, settings.history_days)
    recorder = Recorder(sampler, data, occupancy.jobs_by_uuid, retention=retention)
    recorder.start()
    return Recording(recorder, sampler, job.gpu_uuids)
