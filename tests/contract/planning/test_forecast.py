from __future__ import annotations

from collections.abc import Callable

import pytest

from trainer.contract.planning.forecast import COUNTS, forecast
from trainer.contract.planning.hardware import CPU, MeasuredHardware, Speeds
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sources import DataShape

MakeJob = Callable[..., JobConfig]
SHAPE = DataShape(768, None, 10**9)


def test_the_forecast_time_scales_with_steps_and_the_cost_with_devices_and_time(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 24576}, train={"batch_size": 4096, "n_steps": 1000})
    rows = forecast(Workload(job, 1, SHAPE, "NVIDIA H200"), MeasuredHardware(), price_per_gpu_hour=3.6)
    assert tuple(row.ranks for row in rows) == COUNTS
    for row in rows:
        assert row.seconds == pytest.approx(1000 * row.settled.time.total_s)
        assert row.cost == pytest.approx(row.ranks * row.seconds / 1000)
        assert row.tokens_per_s * row.seconds == pytest.approx(1000 * 4096 * row.ranks)
        assert row.efficiency == pytest.approx(row.tokens_per_s / rows[0].tokens_per_s / row.ranks)


def test_with_a_fixed_step_size_the_speedup_is_at_most_the_number_of_ranks(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 24576}, train={"global_batch_size": 4096})
    for row in forecast(Workload(job, 1, SHAPE, "NVIDIA H200"), MeasuredHardware()):
        assert row.speed_up <= row.ranks


def test_a_forecast_says_whether_its_speeds_are_measured(make_job: MakeJob) -> None:
    box = MeasuredHardware().with_measured("NVIDIA H200", "bf16", 2, Speeds(1e12, 1e12, 1e9, 1e-5, is_measured=True))
    rows = forecast(Workload(make_job(), 1, SHAPE, "NVIDIA H200"), box)
    assert [row.is_measured for row in rows] == [True, True, False, False]


@pytest.mark.parametrize("mode", ["ddp", "tensor", "hybrid", "single"])
def test_a_requested_mode_is_kept_if_possible(mode: str, make_job: MakeJob) -> None:
    modes = [
        row.settled.job.parallel.mode
        for row in forecast(Workload(make_job(parallel={"mode": mode}), 1, SHAPE, CPU), MeasuredHardware())
    ]
    assert modes[0] == "single"
    if mode != "single":
        assert set(modes[1:]) == {mode}


def test_if_a_mode_is_impossible_the_forecast_is_for_its_replacement(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 24576, "k": [31, 32, 33]}, train={"batch_size": 4096}, parallel={"mode": "sweep"})
    rows = forecast(Workload(job, 1, SHAPE, "NVIDIA H200"), MeasuredHardware(), counts=(8,))
    plain = forecast(
        Workload(job.replace("parallel", mode="auto"), 1, SHAPE, "NVIDIA H200"), MeasuredHardware(), counts=(8,)
    )
    assert rows[0].tokens_per_s == plain[0].tokens_per_s
