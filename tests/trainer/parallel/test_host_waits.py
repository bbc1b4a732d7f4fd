"""Tests that with several GPUs, the host waits for its GPU only at steps that log metrics.

Other steps read no values from the GPU, so their exchanges cannot depend on values that might differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import slow_except, slow_unless
from support.fake_gpu import job_of, one_of_ranks
from support.step_ops import Step, recorded_step
from torch import Tensor

from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.saes.topk import TopK

Settings = tuple[dict[str, Any], dict[str, Any]]
# Maps each grid to the number of ranks with different tokens and the number of ranks sharing the latents.
GRIDS = {"ddp": (2, 1), "tensor": (1, 2), "tensor of 8": (1, 8), "hybrid": (2, 4)}
# Maps each case to its parallel and training settings.
SETTINGS: dict[str, Settings] = {
    "usual": ({}, {"precision": "bf16"}),
    "unusual": ({"zero": False, "gradients": "bf16"}, {"precision": "fp16", "accumulate": 2}),
}
CASES = [*((grid, "usual") for grid in GRIDS), ("ddp", "unusual"), ("hybrid", "unusual")]


def is_fast(grid: str, settings: str, architecture: str) -> bool:
    """Return whether `make test` runs a case: hybrid, which makes the exchanges of all modes, or a typical SAE."""
    return grid == "hybrid" or (grid != "tensor of 8" and settings == "usual" and architecture in ("topk", "jumprelu"))


def step_of(grid: str, architecture: str, settings: str = "usual") -> Step:
    ranks, mode = one_of_ranks(*GRIDS[grid])
    # k is small enough, compared with a rank's latents, for every architecture to use sparse matmuls.
    sae, (parallel, train) = {"architecture": architecture, "d_sae": 4096, "k": 16}, SETTINGS[settings]
    return recorded_step(job_of(sae, {"batch_size": 32} | train, mode | parallel), 16, dead=True, parallel=ranks)


@pytest.mark.parametrize(
    ("grid", "settings", "architecture"),
    slow_unless(is_fast, [(*case, architecture) for case in CASES for architecture in ARCHITECTURES]),
)
def test_the_host_never_waits_for_the_device_during_a_step(grid: str, settings: str, architecture: str) -> None:
    step = step_of(grid, architecture, settings)
    assert len(step.ops) > 50
    assert step.waits == []
    assert not [op for op in step.ops if op.is_mixed]


@pytest.mark.parametrize("question", slow_except(["nonzero", "item"], ["nonzero", "__bool__", "cpu", "tolist", "item"]))
def test_reading_a_device_value_is_detected(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopK, "learn_from", lambda sae, sums: getattr(sums[0], question)())
    assert step_of("tensor", "topk").waits


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda sums: torch.tensor([1.0], device=sums.device),
    "as_tensor": lambda sums: torch.as_tensor([1.0], device=sums.device),
    "asarray": lambda sums: torch.asarray([1.0], device=sums.device),
    "new_tensor": lambda sums: sums.new_tensor([1.0]),
}


@pytest.mark.parametrize("copy", slow_except(["tensor", "new_tensor"], COPIES))
def test_a_host_to_device_copy_is_detected(copy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopK, "learn_from", lambda sae, sums: COPIES[copy](sums))
    assert step_of("tensor", "topk").waits


def test_a_tensor_that_stays_on_the_host_does_not_count_as_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopK, "learn_from", lambda sae, sums: torch.tensor([1.0]))
    assert not step_of("tensor", "topk").waits
