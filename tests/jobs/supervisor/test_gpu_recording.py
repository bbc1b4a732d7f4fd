"""Tests that a supervisor records the GPU history while no app is running."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import pytest

from sae_tui.gpu.base import Condition, Xid
from sae_tui.gpu.history import Recorder
from sae_tui.gpu.sampler import Sampler
from sae_tui.gpu.simulated import Simulated, uuid_of
from sae_tui.jobs.supervisor.gpu_recording import Recording, record
from trainer.contract.store.database import StoreError, open_reader
from trainer.contract.store.states import JobState


def test_every_gpu_is_recorded_until_the_job_has_ended(box):
    job = box.job(box.record(gpu_source="simulated", gpu_uuids=(uuid_of(1),), state=JobState.RUNNING))

    def stored() -> set[int]:
        with contextlib.suppress(StoreError), contextlib.closing(open_reader(box.data.gpu_db, "gpu")) as db:
            return {index for (index,) in db.execute("SELECT gpu_index FROM gpu_metrics")}
        return set()

    before = set(threading.enumerate())
    recording = record(box.data, job)
    try:
        box.wait_for(lambda: 1 in stored(), "a sample")
        assert recording.faults(0.0) == []
    finally:
        recording.stop()
    box.wait_for(lambda: set(threading.enumerate()) <= before, "the end of its threads")


def test_a_job_without_gpus_records_nothing(box):
    assert record(box.data, box.job(box.record())) is None


FAILED_ROW = "a row of its memory could not be replaced"
XID = Xid(79, 2e9, "Xid 79: the GPU has fallen off the bus", is_fatal=True)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, None),
        ({"condition": Condition(xid=XID)}, "GPU 1: Xid 79: the GPU has fallen off the bus"),
        ({"condition": Condition(xid=Xid(31, 2e9, "Xid 31: a kernel read"))}, "GPU 1: Xid 31: a kernel read"),
        ({"condition": Condition(xid=Xid(31, 1.0, "Xid 31: a kernel read"))}, None),
        (
            {"condition": Condition(rows_failed=True)},
            "GPU 1: the GPU is failing: a row of its memory could not be replaced",
        ),
        ({"healthy": False, "reason": "GPU is lost"}, "GPU 1: GPU is lost"),
    ],
)
def test_only_faults_on_a_jobs_gpus_since_its_start_are_reported(box, fields, fault):
    class Broken(Simulated):
        def sample(self, index, *, processes):
            return replace(super().sample(index, processes=processes), **fields)

    sampler = Sampler(Broken(2), 0.05)
    sampler.start()
    recording = Recording(Recorder(sampler, box.data), sampler, {uuid_of(1)})
    try:
        box.wait_for(lambda: len(sampler.latest()) == 2, "the first samples")
        assert recording.faults(0.5 if fault is None else 10) == ([fault] if fault else [])
    finally:
        sampler.stop()
