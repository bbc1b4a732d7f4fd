"""Tests how dead latents are resampled: which tokens are chosen, and the new weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.saes import batch, random_sae
from support.steps import take_alone
from torch import Tensor

from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.saes.base import Sae
from trainer.saes.gated import Gated
from trainer.saes.jumprelu import JumpReLU
from trainer.saes.resample import resample
from trainer.saes.standard import Standard
from trainer.training.learner import Learner

SETTINGS: dict[str, Any] = {"k": 5, "sparsity_warmup_fraction": 0.0}
DEAD = [3, 7, 20]


def with_dead(kind: type[Sae] = Standard, *shape: int, **settings: Any) -> Any:
    sae = random_sae(kind, *shape, **(SETTINGS | settings))
    sae.n_tokens_since_fired[DEAD] = 1000
    return sae


def resampled(sae: Sae, x: Tensor, y: Tensor | None = None, seed: int = 0) -> Tensor:
    return resample(sae, x, x if y is None else y, torch.Generator().manual_seed(seed))


def directions(points: Tensor) -> Tensor:
    return points / points.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("shape", [(12, 40), (12, 40, 7)])
def test_each_dead_latent_reads_and_writes_the_direction_of_one_token(shape: tuple[int, ...]) -> None:
    sae, x = with_dead(Standard, *shape), batch(200)
    y = batch(200, 7, seed=9) if sae.is_transcoder else x
    norms = sae.W_enc.norm(dim=0).detach().clone()
    assert resampled(sae, x, y).nonzero().flatten().tolist() == DEAD
    reads = directions(x - sae.input_bias)
    writes = directions(y - sae.b_dec)
    alive = [latent for latent in range(sae.d_sae) if latent not in DEAD]
    for latent in DEAD:
        token = int((writes @ sae.W_dec[latent]).argmax())
        torch.testing.assert_close(sae.W_dec[latent], sae.W_dec[alive].norm(dim=1).mean() * writes[token])
        torch.testing.assert_close(sae.W_enc[:, latent], 0.2 * norms[alive].mean() * reads[token])
        torch.testing.assert_close(sae.b_enc[latent], 0.2 * sae.b_enc[alive].mean())
    assert not sae.dead().any()


def test_live_latents_do_not_change() -> None:
    sae = with_dead()
    before = {name: tensor.clone() for name, tensor in sae.state_dict().items()}
    resampled(sae, batch(200))
    alive = [latent for latent in range(40) if latent not in DEAD]
    assert torch.equal(sae.W_enc[:, alive], before["W_enc"][:, alive])
    for name in ("W_dec", "b_enc", "n_tokens_since_fired"):
        assert torch.equal(sae.state_dict()[name][alive], before[name][alive])
    assert torch.equal(sae.b_dec, before["b_dec"])
    assert sae.training


def test_tokens_are_drawn_in_proportion_to_their_squared_loss() -> None:
    counts = torch.zeros(3)
    x = torch.zeros(3, 12, dtype=torch.float64)
    x[0, 0], x[1, 1], x[2, 2] = 1.0, 2.0, 3.0
    for seed in range(400):
        sae = with_dead()
        # No latent is active, so each token's loss is its squared norm: 1, 4 or 9.
        sae.b_enc.data[:] = -1e6
        sae.b_dec.data[:] = 0
        sae.n_tokens_since_fired[DEAD[1:]] = 0
        resampled(sae, x, seed=seed)
        counts[int(sae.W_dec[DEAD[0]].argmax())] += 1
    expected = torch.tensor([1.0, 16.0, 81.0]) / 98
    torch.testing.assert_close(counts / 400, expected, atol=0.06, rtol=0)


def test_if_there_are_more_dead_latents_than_tokens_some_latents_share_a_token() -> None:
    sae = with_dead()
    sae.n_tokens_since_fired[:30] = 1000
    assert int(resampled(sae, batch(4)).sum()) == 30


@pytest.mark.parametrize("dead", [[], list(range(40))])
def test_nothing_is_resampled_if_no_or_all_latents_are_dead(dead: list[int]) -> None:
    sae = random_sae(Standard, **SETTINGS)
    sae.n_tokens_since_fired[dead] = 1000
    before = sae.W_dec.detach().clone()
    assert not resampled(sae, batch()).any()
    assert torch.equal(sae.W_dec, before)


def test_thresholds_and_magnitude_biases_restart_like_encoder_biases() -> None:
    jump = with_dead(JumpReLU, penalty="l0", tanh_scale=4.0, bandwidth=0.5)
    jump.threshold.data.abs_()
    gated = with_dead(Gated)
    alive = [latent for latent in range(40) if latent not in DEAD]
    for sae, name in ((jump, "threshold"), (gated, "b_mag")):
        typical = getattr(sae, name)[alive].mean()
        resampled(sae, batch(200))
        torch.testing.assert_close(getattr(sae, name)[DEAD], (0.2 * typical).expand(3))
    assert not gated.r_mag[DEAD].any()
    assert gated.r_mag[alive].all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("optimizer", [{}, {"state": "int8"}, {"optimizer": "signum"}, {"optimizer": "muon"}], ids=str)
def test_resampled_latents_fire_again_and_have_no_optimizer_state(
    architecture: str, optimizer: dict, make_job: Callable[..., JobConfig]
) -> None:
    job = make_job(sae={"architecture": architecture, "d_sae": 256}, train={"batch_size": 200} | optimizer)
    learner = Learner(job, 12, None, Parallel(torch.device("cpu")))
    x = batch(2000).float()
    learner.initialise(x, x)
    for step in range(3):
        take_alone(learner, step, x[200 * step : 200 * step + 200])
    learner.sae.n_tokens_since_fired[DEAD] = 10**6
    revived = learner.resample(3, x, x)
    assert revived.nonzero().flatten().tolist() == DEAD
    learner.forget(revived)
    for name, remembered in moments(learner):
        of_dead = remembered[:, DEAD] if "W_enc" in name else remembered[DEAD]
        assert not of_dead.any(), name
    with learner.evaluating():
        scaled = x * learner.sae.x_scale
        fired = (learner.sae(scaled, scaled).acts.dense() > 0).any(dim=0)
    assert fired[DEAD].all()


def moments(learner: Learner) -> list[tuple[str, Tensor]]:
    """Return the optimizer moments for all parameters with one slice per latent."""
    kinds = ("exp_avg", "exp_avg_sq", "momentum_buffer", "momentum")
    shapes = {name: parameter.shape for name, parameter in learner.sae.named_parameters()}
    states = [(name.split(".", 2), tensor) for name, tensor in learner.state.tensors() if name.startswith("optimizer.")]
    return [
        (name, tensor)
        for (_, kind, name), tensor in states
        if kind in kinds and tensor.shape == shapes[name] and name != "b_dec"
    ]
