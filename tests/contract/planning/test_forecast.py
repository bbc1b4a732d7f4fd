from __future__ import annotations

from collections.abc import Callable

import pytest

from trainer.contract.planning.forecast import COUNTS, forecast
from trainer.contract.planning.hardware import CPU, Box, Speeds
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sources import DataShape

MakeJob = Callable[..., JobConfig]
SHAPE = DataShape(768, None, 10**9)


def test_time_is_steps_and_cost_is_devices_by_time(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 24576}, train={"batch_size": 4096, "n_steps": 1000})
    rows = forecast(Workload(job, 1, SHAPE, "NVIDIA H200"), Box(), price_per_gpu_hour=3.6)
    assert tuple(row.ranks for row in rows) == COUNTS
    for row in rows:
        assert row.seconds == pytest.approx(1000 * row.settled.time.total_s)
        assert row.cost == pytest.approx(row.ranks * row.seconds / 1000)
        assert row.tokens_per_s * row.seconds == pytest.approx(1000 * 4096 * row.ranks)
        assert row.efficiency == pytest.approx(row.tokens_per_s / rows[0].tokens_per_s / row.ranks)


def test_a_fixed_step_is_never_sped_up_more_than_the_work_is_divided(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 24576}, train={"global_batch_size": 4096})
    for row in forecast(Workload(job, 1, SHAPE, "NVIDIA H200"), Box()):
        assert row.speed_up <= row.ranks


def test_what_was_measured_counts_and_is_told(make_job: MakeJob) -> None:
    box = Box().with_measured("NVIDIA H200", "bf16", 2, Speeds(1e12, 1e12, 1e9, 1e-5, is_measured=True))
    rows = forecast(Workload(make_job(), 1, SHAPE, "NVIDIA H200"), box)
    assert [row.is_measured for row in rows] == [True, True, False, False]


@pytest.mark.parametrize("mode", ["ddp", "tensor", "hybrid", "single"])
def test_a_mode_that_was_asked_for_holds_where_it_can(mode: str, make_job: MakeJob) -> None:
    modes = [
        row.settled.job.parallel.mode
        for row in forecast(Workload(make_job(parallel={"mode": mode}), 1, SHAPE, CPU), Box())
    ]
    assert modes[0] == "single"
    if mode != "single":
        assert set(modes[1:]) == {mode}


def test_where_a_mode_cannot_be_the_time_is_that_of_the_mode_that_stands_in(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 24576, "k": [31, 32, 33]}, train={"batch_size": 4096}, parallel={"mode": "sweep"})
    rows = forecast(Workload(job, 1, SHAPE, "NVIDIA H200"), Box(), counts=(8,))
    plain = forecast(Workload(job.replace("parallel", mode="auto"), 1, SHAPE, "NVIDIA H200"), Box(), counts=(8,))
    assert rows[0].tokens_per_s == plain[0].tokens_per_s
