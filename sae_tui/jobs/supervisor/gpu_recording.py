"""Stores GPU samples from a supervisor, so that a job's history has no gap when no app runs."""

from __future__ import annotations

from collections.abc import Callable

from sae_tui.gpu.history import Recorder
from sae_tui.gpu.sampler import Sampler
from sae_tui.gpu.upkeep import Retention
from sae_tui.jobs.cards.occupancy import Occupancy, gpu_source
from sae_tui.settings import load_settings
from trainer.contract.paths import DataDir
from trainer.contract.store.rows import Job


def record(data: DataDir, job: Job) -> Callable[[], object] | None:
    """Start to record GPU samples if this process is elected to; return what ends it, None for a job without GPUs."""
    if not job.gpu_uuids:
        return None
    occupancy = Occupancy(data)
    settings, _ = load_settings(data.settings_file)
    sampler = Sampler(gpu_source(job.gpu_source, occupancy), settings.sampling_interval_s)
    retention = Retention(settings.history_hours, settings.history_days)
    recorder = Recorder(sampler, data, occupancy.jobs_by_uuid, retention=retention)
    recorder.start()

    def stop() -> None:
        recorder.stop()
        sampler.stop()

    return stop
