"""Tests for SAEs whose matrices keep their random initial values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.steps import skips, take_alone
from torch import Tensor

from trainer.contract.planning.rates import full_rate
from trainer.contract.planning.workload import Layout
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.training.learner import Learner

MakeJob = Callable[..., JobConfig]
ALL = ("topk", "hierarchical_topk", "batch_topk", "matryoshka_batch_topk", "jumprelu", "gated", "standard")
FROZEN = {"decoder": {"W_dec"}, "encoder": {"W_enc"}, "both": {"W_enc", "W_dec"}}


def rows(n: int = 256, seed: int = 1) -> Tensor:
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(seed))


def learner(make_job: MakeJob, sae: dict[str, Any], **train: Any) -> Learner:
    job = make_job(sae=sae, train={"lr": 1e-2, "n_steps": 20} | train)
    made = Learner(job, 16, None, Parallel(torch.device("cpu")))
    made.initialise(rows(500, 9), rows(500, 9))
    return made


@pytest.mark.parametrize("freeze", [*FROZEN])
@pytest.mark.parametrize(
    ("architecture", "optimizer"), [*((one, "adam") for one in ALL), ("topk", "signum"), ("topk", "muon")]
)
def test_frozen_matrices_keep_every_bit_and_all_other_weights_learn(
    make_job: MakeJob, architecture: str, optimizer: str, freeze: str
) -> None:
    one = learner(make_job, {"architecture": architecture, "freeze": freeze}, optimizer=optimizer)
    before = {name: value.detach().clone() for name, value in one.sae.named_parameters()}
    for number in range(6):
        take_alone(one, number, rows(seed=number))
    assert skips(one) == (0, 0, 0)
    with one.evaluating():
        trained = {name: value.detach().clone() for name, value in one.sae.named_parameters()}
    for after in (dict(one.sae.named_parameters()), trained):
        kept = {name for name, value in after.items() if torch.equal(value, before[name])}
        assert kept >= FROZEN[freeze]
        assert not kept & {"W_enc", "W_dec", "b_dec"} - FROZEN[freeze]


@pytest.mark.parametrize("freeze", [*FROZEN])
def test_a_frozen_sae_is_trained_at_the_rate_of_one_whose_updates_are_not_tied(make_job: MakeJob, freeze: str) -> None:
    rates = [
        full_rate(Layout(make_job(sae=sae, train={"lr": "auto"}), 1), 64, is_transcoder=False)
        for sae in ({"freeze": freeze}, {"encoder_follows": "off"})
    ]
    assert rates[0] == rates[1]


def test_with_a_frozen_decoder_the_encoder_still_learns_to_reconstruct(make_job: MakeJob) -> None:
    losses = []
    for freeze in ("off", "decoder", "both"):
        one = learner(make_job, {"freeze": freeze}, n_steps=80)
        for number in range(80):
            take_alone(one, number, rows(seed=number % 7))
        output = one.forward(*one.normalised(rows(seed=3), rows(seed=3)))
        losses.append(float(output.losses["mse"].detach()))
    assert losses[0] < losses[1] < losses[2]
