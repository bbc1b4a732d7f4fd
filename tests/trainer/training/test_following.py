from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.steps import skips, take_alone
from torch import Tensor

from trainer.contract.settings.catalog import OPTIMIZERS
from trainer.contract.settings.following import decay_fraction
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.training.following import Following
from trainer.training.learner import Learner

MakeJob = Callable[..., JobConfig]
CPU = torch.device("cpu")
RATES = OPTIMIZERS["adam"].following
assert RATES
OFF = {"encoder_follows": "off"}


def rows(n: int = 256, seed: int = 1) -> Tensor:
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(seed))


def learner(make_job: MakeJob, sae: dict[str, Any] | None = None, **train: Any) -> Learner:
    made = Learner(make_job(sae=sae or {}, train={"lr": 1e-2, "n_steps": 20} | train), 16, None, Parallel(CPU))
    made.initialise(rows(500, 9), rows(500, 9))
    return made


def weights(of: Learner) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in of.sae.named_parameters()}


@pytest.mark.parametrize("architecture", ["topk", "hierarchical_topk", "batch_topk", "matryoshka_batch_topk"])
@pytest.mark.parametrize("scale", ["auto", 0.5])
def test_tied_updates_move_the_encoder_with_the_decoder_and_by_part_of_its_own_step(
    make_job: MakeJob, architecture: str, scale: str | float
) -> None:
    sae = {"architecture": architecture, "encoder_scale": scale}
    follows, alone = learner(make_job, sae), learner(make_job, sae | OFF)
    before, share = weights(follows), follows.sae.traits.encoder_scale if scale == "auto" else scale
    torch.testing.assert_close(before["W_enc"], share * before["W_dec"].T)
    for one in (follows, alone):
        take_alone(one, 0, rows())
    after, own = weights(follows), weights(alone)
    for name in ("W_dec", "b_dec", "b_enc"):
        torch.testing.assert_close(after[name], own[name], msg=name)
    moved = RATES.encoder * (own["W_enc"] - before["W_enc"]) + share * (after["W_dec"] - before["W_dec"]).T
    torch.testing.assert_close(after["W_enc"], before["W_enc"] + moved, rtol=1e-5, atol=1e-6)


def test_a_skipped_step_leaves_every_bit_unchanged(make_job: MakeJob) -> None:
    one = learner(make_job)
    take_alone(one, 0, rows())
    before = weights(one)
    take_alone(one, 1, torch.full((8, 16), torch.inf))
    assert skips(one) == (1, 1, 0)
    for name, value in weights(one).items():
        assert torch.equal(value, before[name]), name


def test_a_set_rate_applies_to_the_decoder_and_auto_is_higher_with_tied_updates(make_job: MakeJob) -> None:
    asked, auto, alone = learner(make_job), learner(make_job, lr="auto"), learner(make_job, OFF, lr="auto")
    for one in (asked, auto, alone):
        one.begin_step(0)
    others, encoder = asked.optimizer.param_groups
    assert (others["lr"], encoder["lr"]) == (1e-2, pytest.approx(1e-2 * RATES.encoder))
    rates = [one.optimizer.param_groups[0]["lr"] for one in (auto, alone)]
    assert rates[0] == pytest.approx(RATES.lr * rates[1])


@pytest.mark.parametrize(
    ("sae", "train"),
    [
        (OFF, {}),
        ({"encoder_init": "independent"}, {}),
        ({"architecture": "jumprelu"}, {}),
        ({"architecture": "standard"}, {}),
        ({}, {"optimizer": "signum"}),
        ({}, {"optimizer": "muon"}),
    ],
)
def test_updates_are_not_tied_for_settings_without_known_rates(
    make_job: MakeJob, sae: dict[str, Any], train: dict[str, Any]
) -> None:
    assert len(learner(make_job, sae, **train).optimizer.param_groups) == 1


def test_with_tied_updates_the_rate_decays_for_longer_unless_the_decay_is_set(make_job: MakeJob) -> None:
    follows, alone = make_job(), make_job(sae=OFF)
    assert [decay_fraction(job, is_transcoder=False) for job in (follows, alone)] == [RATES.decay, 0.2]
    assert decay_fraction(follows, is_transcoder=True) == 0.2
    assert decay_fraction(make_job(train={"decay_fraction": 0.0}), is_transcoder=False) == 0.0


def test_transcoder_updates_are_not_tied(make_job: MakeJob) -> None:
    assert len(Learner(make_job(), 16, 16, Parallel(CPU)).optimizer.param_groups) == 1


def test_separating_and_recombining_the_encoder_restores_its_weights() -> None:
    parameters = {"W_enc": torch.nn.Parameter(rows(6).T.contiguous()), "W_dec": torch.nn.Parameter(rows(6, 2))}
    before = parameters["W_enc"].detach().clone()
    with Following(0.3, parameters).apart(torch.tensor(False)):
        torch.testing.assert_close(parameters["W_enc"].detach(), before - 0.3 * parameters["W_dec"].detach().T)
    torch.testing.assert_close(parameters["W_enc"].detach(), before)
