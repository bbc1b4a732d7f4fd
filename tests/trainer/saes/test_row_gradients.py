from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.saes import assert_same
from support.steps import ALONE
from torch import Tensor, nn

from trainer.contract.settings.job import JobConfig
from trainer.saes.row_gradients import RowGradients
from trainer.training.learner import Learner

MakeJob = Callable[..., JobConfig]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_rows_of_several_passes_are_added_to_what_is_there_or_to_nothing(
    has_gradient: bool, dtype: torch.dtype
) -> None:
    by_row, by_column, left = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(6, 4).T), RowGradients()
    if has_gradient:
        by_row.grad, by_column.grad = torch.ones(5, 3), torch.ones(6, 4).T
    for latents in (torch.tensor([3, 0]), torch.tensor([3])):
        (left.rows(by_row, latents, 0, dtype).sum() + 2 * left.rows(by_column, latents, 1, dtype).sum()).backward()
    assert torch.equal(left.rows(by_column, torch.tensor([3]), 1, dtype)[0], by_column[:, 3].to(dtype))
    left.add()
    times = torch.tensor([1.0, 0, 0, 2, 0, 0])
    assert by_row.grad is not None
    assert by_column.grad is not None
    assert torch.equal(by_row.grad, times[:5, None].expand(5, 3) + has_gradient)
    assert torch.equal(by_column.grad, 2 * times.expand(4, 6) + has_gradient)
    assert by_column.grad.stride() == by_column.stride()
    assert not left.take()


def spread_out(self: RowGradients, parameter: Tensor, latents: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the same rows, whose gradient autograd spreads over all latents."""
    return parameter.movedim(dim, 0).index_select(0, latents).to(dtype)


def gradients(learner: Learner, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the gradients that two micro-batches leave where twenty latents are dead."""
    learner.initialise(x, y)
    learner.sae.n_tokens_since_fired[5:25] = 10**6
    for part in range(2):
        rows = slice(100 * part, 100 * part + 100)
        learner.accumulate(x[rows], x[rows] if y is x else y[rows])
    return {name: one.grad for name, one in learner.sae.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("sae", [{}, {"architecture": "batch_topk", "skip": True}], ids=str)
def test_all_weights_learn_from_auxk_what_autograd_finds_by_itself(
    sae: dict[str, Any], precision: str, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"precision": precision}
    job, without_auxk = make_job(sae=sae, train=train), make_job(sae=sae | {"auxk_alpha": 0.0}, train=train)
    x = torch.randn(200, 16)
    y = torch.randn(200, 12) if sae else x
    d_out = 12 if sae else None
    found = gradients(Learner(job, 16, d_out, ALONE), x, y)
    without = gradients(Learner(without_auxk, 16, d_out, ALONE), x, y)
    monkeypatch.setattr(RowGradients, "rows", spread_out)
    expected = gradients(Learner(job, 16, d_out, ALONE), x, y)
    assert_same(found, expected)
    for name in ("W_enc", "b_enc", "W_dec"):
        assert (found[name] != without[name]).any()


def test_a_pass_that_is_undone_leaves_no_rows_for_the_next(make_job: MakeJob) -> None:
    learner, x = Learner(make_job(), 16, None, ALONE), torch.randn(100, 16)
    learner.initialise(x, x)
    learner.sae.n_tokens_since_fired[5:25] = 10**6
    # As where memory runs out between the backward pass and what follows.
    learner.sae.objective(learner.forward(x, x).losses).backward()
    learner.forget_pass()
    learner.sae.row_gradients.add()
    assert all(one.grad is None for one in learner.sae.parameters())
