"""The host of one of several GPUs waits for it in no step that does not log: it asks for none of the device's numbers.

So what ranks exchange cannot depend on numbers either, in which they might differ.
"""

from __future__ import annotations

import pytest
from support.fake_gpu import job_of, one_of_ranks
from support.step_ops import Step, recorded_step

from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.saes.topk import TopK

# How many ranks have tokens of their own, and how many share the latents.
GRIDS = {"ddp": (2, 1), "tensor": (1, 2), "tensor of 8": (1, 8), "hybrid": (2, 4)}


def step_of(grid: str, architecture: str) -> Step:
    ranks, settings = one_of_ranks(*GRIDS[grid])
    sae, train = {"architecture": architecture, "d_sae": 64, "k": 4}, {"precision": "bf16", "batch_size": 32}
    return recorded_step(job_of(sae, train, settings), 16, dead=True, parallel=ranks)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("grid", GRIDS)
def test_no_step_waits_for_the_device(grid: str, architecture: str) -> None:
    step = step_of(grid, architecture)
    assert len(step.ops) > 50
    assert step.waits == []
    assert not [op for op in step.ops if op.is_mixed]


@pytest.mark.parametrize("question", ["nonzero", "__bool__", "cpu", "tolist", "item"])
def test_a_question_would_be_seen(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopK, "learn_from", lambda sae, sums: getattr(sums[0], question)())
    assert step_of("tensor", "topk").waits
