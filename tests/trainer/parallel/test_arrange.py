"""Ranks take a mode that fits into what they were given of their devices."""

from __future__ import annotations

import pytest
from support.workloads import workload

from trainer.contract.planning import memory
from trainer.contract.planning.choose_mode import Place, settle
from trainer.contract.planning.hardware import CPU, assumed_speeds
from trainer.contract.planning.plan import read_plan
from trainer.contract.planning.workload import Workload


@pytest.mark.timeout(200)
def test_ranks_take_no_more_than_they_were_given(make_job, start_ranks, tmp_path) -> None:
    job = make_job(sae={"d_sae": 4096}, train={"batch_size": 800, "n_steps": 1, "deterministic": True})
    free = Place(assumed_speeds(CPU, "fp32"))
    assert settle(Workload(job, 2, job.data_shape(), CPU), free).job.parallel.mode == "ddp"
    ddp, tensor = (
        memory.estimate(workload(job.replace("parallel", mode=mode), job.data_shape().d_in, 2, device="cpu")).total
        for mode in ("ddp", "tensor")
    )
    assert tensor < ddp
    ranks = start_ranks(job, 2, may_take_bytes=(ddp + tensor) // 2)
    assert ranks.wait() == [0, 0]
    plan = read_plan(tmp_path / "run" / "attempt1" / "plan.json")
    assert plan
    assert plan.mode != "ddp"
    assert plan.needs_bytes <= (ddp + tensor) // 2
