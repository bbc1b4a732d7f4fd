"""Recorded steps, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from support.fake_gpu import job_of
from support.interpreted import run_cases

from trainer.contract.planning import recorded_steps
from trainer.contract.planning.workload import Layout
from trainer.parallel.base import Parallel
from trainer.training.learner import Learner
from trainer.training.recorded_step import recorded

CASES = Path(__file__).with_name("recorded_cases.py")


def test_recorded_steps_are_the_plain_ones() -> None:
    run_cases(CASES, on_cpu=True)


def pays(sae: dict[str, object], d_in: int = 768, precision: str = "bf16", ranks: int = 1, **train: object) -> bool:
    job = job_of({"architecture": "topk", "d_sae": 24576} | sae, {"batch_size": 4096} | train)
    return recorded_steps.pays(Layout(job, ranks), d_in, d_in, precision=precision)


def test_steps_of_a_lone_gpu_are_recorded_unless_they_are_very_long() -> None:
    assert pays({})
    assert pays({"architecture": "batch_topk"})
    assert pays({"d_sae": 65536}, d_in=2304)
    assert not pays({"d_sae": 262144}, d_in=2304)
    assert not pays({}, ranks=2)
    assert not pays({}, precision="fp32")
    assert not pays({}, accumulate=2)
    assert not pays({}, deterministic=True)
    assert not pays({}, optimizer="signum")
    assert pays({"architecture": "jumprelu"})
    # There will never be so few that sparse products are the faster ones.
    assert not pays({"architecture": "jumprelu", "k": 512})
    assert not pays({"k": [16, 32]})


def test_a_cpu_records_nothing() -> None:
    job = job_of({"architecture": "topk", "d_sae": 64}, {"batch_size": 64, "precision": "bf16"})
    alone = Parallel(torch.device("cpu"))
    assert recorded(Learner(job, 16, None, alone), job, alone) is None
