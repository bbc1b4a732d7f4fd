"""Tests for computing a job's energy from the GPU samples stored while the job runs."""

from __future__ import annotations

import contextlib

import pytest

from sae_tui.jobs.supervisor.energy_meter import EVERY_S, EnergyMeter
from trainer.contract.store.database import open_writer
from trainer.contract.store.states import JobState

NOW = 1_700_000_000.0
GPUS = ((0, "GPU-a"), (3, "GPU-b"))


@pytest.fixture
def job_id(box):
    fields = {"gpu_ids": (0, 3), "gpu_uuids": ("GPU-a", "GPU-b"), "state": JobState.RUNNING}
    return box.record(**fields)


def store(box, seconds, power_w: float, gpus=GPUS, counter=None) -> None:
    with contextlib.closing(open_writer(box.data.gpu_db, "gpu")) as db:
        for index, uuid in gpus:
            rows = [
                (box.job(1).host, index, NOW + second, uuid, power_w, counter and counter * second)
                for second in seconds
            ]
            query = "INSERT INTO gpu_metrics(host, gpu_index, timestamp, gpu_uuid, power_draw, energy)"
            db.executemany(f"{query} VALUES(?, ?, ?, ?, ?, ?)", rows)


def meter_of(box, job_id: int, now: list[float]) -> EnergyMeter:
    return EnergyMeter(box.data, box.control, box.job(job_id), lambda: now[0], lambda: now[0])


def test_a_jobs_energy_is_what_all_its_gpus_use_while_it_runs(box, job_id):
    now = [NOW]
    meter = meter_of(box, job_id, now)
    store(box, range(-60, 31), 360.0)
    store(box, range(31), 9999.0, gpus=[(1, "GPU-of-others")])
    now[0] += EVERY_S
    meter.turn()
    job = box.job(job_id)
    assert job.energy_wh == pytest.approx(2 * 360 * 30 / 3600)
    assert (job.energy_s, job.energy_known_s, job.energy_counted_s) == pytest.approx((60, 60, 0))


def test_no_energy_is_written_before_the_first_interval_has_passed(box, job_id):
    meter = meter_of(box, job_id, [NOW])
    meter.turn()
    assert box.job(job_id).energy_s is None


def test_energy_is_summed_over_attempts_without_the_pauses_between_them(box, job_id):
    store(box, range(301), 360.0, counter=400.0)
    for begin in (0, 200):
        now = [NOW + begin]
        meter = meter_of(box, job_id, now)
        now[0] += 100
        meter.end()
        meter.end()
    job = box.job(job_id)
    assert job.energy_s == pytest.approx(400)
    # The first second of each attempt precedes its first counter reading.
    assert job.energy_wh == pytest.approx(2 * 2 * (360 + 99 * 400) / 3600)
    assert job.energy_counted_s == pytest.approx(4 * 99)


def test_setting_the_clock_back_loses_no_measured_energy(box, job_id):
    store(box, range(-200, 101), 360.0)
    now = [NOW]
    meter = meter_of(box, job_id, now)
    now[0] += 100
    meter.end()
    now[0] -= 200
    meter.end()
    now[0] += 50
    meter.end()
    job = box.job(job_id)
    assert job.energy_wh == pytest.approx(2 * 360 * 150 / 3600)
    assert (job.energy_s, job.energy_known_s) == pytest.approx((300, 300))


def test_moving_the_clock_a_day_ahead_and_back_adds_no_unmeasured_time(box, job_id):
    day = 86_400
    store(box, [*range(101), *range(day + 100, day + 201), *range(201, 301)], 360.0)
    now, steady = [NOW], [50.0]
    meter = EnergyMeter(box.data, box.control, box.job(job_id), lambda: now[0], lambda: steady[0])
    for wall in (100, day + 100, day + 200, 200, 300):
        steady[0] += 100 if wall in (100, day + 200, 300) else 0
        now[0] = NOW + wall
        meter.end()
    job = box.job(job_id)
    assert job.energy_s == pytest.approx(600)
    assert job.energy_known_s == pytest.approx(600, abs=4)


def test_an_unreadable_history_does_not_affect_the_job(box, job_id):
    now = [NOW]
    meter = meter_of(box, job_id, now)
    box.data.gpu_db.write_bytes(b"no database at all" * 100)
    now[0] += EVERY_S
    meter.turn()
    assert box.job(job_id).energy_wh is None


def test_a_job_without_gpus_has_no_energy_figures(box):
    job_id = box.record(state=JobState.RUNNING)
    meter_of(box, job_id, [NOW]).end()
    assert box.job(job_id).energy_s is None
