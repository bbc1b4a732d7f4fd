"""The history of GPUs while no app runs."""

from __future__ import annotations

import contextlib
import threading

from sae_tui.gpu.simulated import uuid_of
from sae_tui.jobs.supervisor.gpu_recording import record
from trainer.contract.store.database import StoreError, open_reader
from trainer.contract.store.states import JobState


def test_every_card_is_stored_until_the_job_has_ended(box):
    job = box.job(box.record(gpu_source="simulated", gpu_uuids=(uuid_of(1),), state=JobState.RUNNING))

    def stored() -> set[int]:
        with contextlib.suppress(StoreError), contextlib.closing(open_reader(box.data.gpu_db, "gpu")) as db:
            return {index for (index,) in db.execute("SELECT gpu_index FROM gpu_metrics")}
        return set()

    before = set(threading.enumerate())
    stop = record(box.data, job)
    try:
        box.wait_for(lambda: 1 in stored(), "a sample")
    finally:
        stop()
    box.wait_for(lambda: set(threading.enumerate()) <= before, "the end of its threads")


def test_a_job_without_gpus_records_nothing(box):
    assert record(box.data, box.job(box.record())) is None
