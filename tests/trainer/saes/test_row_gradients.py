from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.saes import assert_same
from support.steps import ALONE
from torch import Tensor, nn

from trainer.contract.settings.job import JobConfig
from trainer.saes import auxk
from trainer.saes.auxk import DeadCandidates
from trainer.saes.base import Sae
from trainer.saes.kernels import top_k
from trainer.saes.kernels.dead_latents import Weights
from trainer.saes.row_gradients import RowGradient, RowGradients
from trainer.training.learner import Learner

MakeJob = Callable[..., JobConfig]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_row_gradients_from_several_passes_are_added_to_a_gradient_or_create_one(
    has_gradient: bool, dtype: torch.dtype
) -> None:
    parameters = Weights(*map(nn.Parameter, (torch.randn(6, 4).T, torch.randn(6), torch.randn(6, 3))))
    input_bias, left = nn.Parameter(torch.randn(4)), RowGradients()
    if has_gradient:
        for one in (*parameters, input_bias):
            one.grad = torch.ones_like(one)
    for latents in (torch.tensor([3, 0]), torch.tensor([3])):
        n = len(latents)
        rows = Weights(torch.ones(n, 4), torch.full((n,), 2.0), torch.full((n, 3), 3.0))
        rows = Weights(*(one.to(dtype) for one in rows))
        learns = len(latents) == 1
        of_centred = torch.full((4,), 5.0, dtype=dtype) if learns else None
        left.leave(RowGradient(parameters, input_bias if learns else None, latents, rows, of_centred))
    left.add()
    times = torch.tensor([1.0, 0, 0, 2, 0, 0])
    W_enc, b_enc, W_dec = (one.grad for one in parameters)
    assert torch.equal(W_enc, times.expand(4, 6) + has_gradient)
    assert torch.equal(b_enc, 2 * times + has_gradient)
    assert torch.equal(W_dec, 3 * times[:, None].expand(6, 3) + has_gradient)
    assert W_enc.stride() == parameters.W_enc.stride()
    assert input_bias.grad is not None
    assert torch.equal(input_bias.grad, torch.full((4,), has_gradient - 5.0))
    assert not left.take()


def by_autograd(sae: Sae, centred: Tensor, candidates: DeadCandidates) -> Tensor:
    """Return the AuxK reconstruction; autograd scatters the weight gradients over all latents."""
    of_candidates = (one.index_select(0, candidates.latents) for one in (sae.W_enc.T, sae.b_enc, sae.W_dec))
    reads, b_enc, writes = (one.to(centred.dtype) for one in of_candidates)
    # The bias has already been subtracted, so this term is 0 and only propagates the gradient.
    subtracted = reads @ (sae.input_bias - sae.input_bias.detach()).to(centred.dtype)
    bias = torch.where(candidates.rows.b_enc > -torch.inf, b_enc - subtracted, -torch.inf)
    acts = torch.addmm(bias, centred, reads.T)
    return (acts * (top_k.strongest(acts.detach(), candidates.n_chosen) > 0)) @ writes


def gradients(learner: Learner, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the gradients after two micro-batches with 20 dead latents."""
    learner.initialise(x, y)
    learner.sae.n_tokens_since_fired[5:25] = 10**6
    for part in range(2):
        rows = slice(100 * part, 100 * part + 100)
        learner.accumulate(x[rows], x[rows] if y is x else y[rows])
    return {name: one.grad for name, one in learner.sae.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("sae", [{}, {"architecture": "batch_topk", "skip": True}], ids=str)
def test_the_auxk_gradients_for_all_weights_match_autograd(
    sae: dict[str, Any], precision: str, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"precision": precision}
    job, without_auxk = make_job(sae=sae, train=train), make_job(sae=sae | {"auxk_alpha": 0.0}, train=train)
    x = torch.randn(200, 16)
    y = torch.randn(200, 12) if sae else x
    d_out = 12 if sae else None
    found = gradients(Learner(job, 16, d_out, ALONE), x, y)
    without = gradients(Learner(without_auxk, 16, d_out, ALONE), x, y)
    monkeypatch.setattr(auxk, "_explained", by_autograd)
    expected = gradients(Learner(job, 16, d_out, ALONE), x, y)
    assert_same(found, expected)
    for name in ("W_enc", "b_enc", "W_dec") if sae else found:
        assert (found[name] != without[name]).any()


def test_an_undone_pass_leaves_no_row_gradients(make_job: MakeJob) -> None:
    learner, x = Learner(make_job(), 16, None, ALONE), torch.randn(100, 16)
    learner.initialise(x, x)
    learner.sae.n_tokens_since_fired[5:25] = 10**6
    # Simulate running out of memory directly after the backward pass.
    learner.sae.objective(learner.forward(x, x).losses).backward()
    learner.forget_pass()
    learner.sae.row_gradients.add()
    assert all(one.grad is None for one in learner.sae.parameters())
