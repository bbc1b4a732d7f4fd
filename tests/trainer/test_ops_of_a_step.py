"""Tests that a step runs the listed GPU operations, that all operands are on the GPU, and that the host never waits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support.combinations import slow_except, slow_unless
from support.fake_gpu import job_of
from support.step_ops import Step, recorded_step
from support.step_table import ARCHITECTURES, COLUMNS, rows
from torch import Tensor

from trainer.saes.topk import TopK

TABLE = Path(__file__).with_name("ops_of_a_step.csv")
# k is small enough, compared with d_sae, for every architecture to use sparse matmuls.
SMALL = {"d_sae": 2048, "k": 16}


def step_of(sae: dict[str, Any], train: dict[str, Any]) -> Step:
    return recorded_step(job_of(SMALL | sae, {"batch_size": 512} | train), 128, dead=True)


def test_a_steps_operations_match_those_in_the_table() -> None:
    now, before = list(rows()), TABLE.read_text().splitlines()
    changed = [f"{was}  ->  {row}" for was, row in zip(before, now, strict=True) if was != row]
    assert not changed, f"if the change is intended, run support/step_table.py: {COLUMNS}\n" + "\n".join(changed)


@pytest.mark.parametrize(
    ("architecture", "precision"),
    slow_unless(
        lambda architecture, precision: precision == "bf16" or architecture in ("topk", "jumprelu"),
        itertools.product(ARCHITECTURES, ("fp32", "tf32", "bf16", "fp16")),
    ),
)
def test_the_host_never_waits_and_every_operand_is_on_the_device(architecture: str, precision: str) -> None:
    step = step_of({"architecture": architecture}, {"precision": precision})
    assert not step.waits
    assert not [op for op in step.ops if op.is_mixed]


@pytest.mark.parametrize("architecture", slow_except(["batch_topk", "gated", "jumprelu"], ARCHITECTURES))
def test_the_host_never_waits_between_micro_batches(architecture: str) -> None:
    assert not step_of({"architecture": architecture}, {"precision": "bf16", "accumulate": 2}).waits


@pytest.mark.parametrize(
    "train",
    [{"state": "bf16"}, {"state": "int8"}, {"optimizer": "signum"}, {"optimizer": "muon"}, {"grad_clip": 0.0}],
    ids=str,
)
def test_the_host_never_waits_with_any_optimizer(train: dict[str, Any]) -> None:
    step = step_of({"architecture": "topk"}, train | {"precision": "bf16"})
    assert not step.waits
    assert not [op for op in step.ops if op.is_mixed]


def test_a_host_wait_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn_from(sae: TopK, sums: Tensor) -> None:
        float(sums[0])

    monkeypatch.setattr(TopK, "learn_from", learn_from)
    (wait,) = step_of({"architecture": "topk"}, {"precision": "bf16"}).waits
    assert wait.startswith("_local_scalar_dense")
