"""Tests a transcoder's skip connection with every architecture that supports transcoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.combinations import slow_except
from support.saes import KINDS, TRANSCODERS, assert_same, batch, gradients, new_sae, random_sae
from torch import Tensor

from trainer.api import train
from trainer.contract.errors import UserError
from trainer.saes.base import Sae
from trainer.saes.batch_topk import BatchTopK
from trainer.saes.resample import resample

D_OUT = 7


def random_transcoder(kind: str, *, skip: bool = True, **changes: Any) -> Sae:
    """Create a transcoder for data with a nonzero mean, with AuxK if its architecture supports it."""
    kind_class, settings, _ = KINDS[kind]
    own = {"auxk_alpha": 1 / 32, "k_aux": 4} if "auxk_alpha" in settings else {}
    sae: Sae = random_sae(kind_class, 12, 40, D_OUT, **(settings | own | changes))
    sae.x_mean.copy_(batch(1, seed=9)[0])
    if skip:
        sae.W_skip = torch.nn.Parameter(batch(12, D_OUT, seed=4))
    return sae


def of_skip(sae: Sae, x: Tensor) -> Tensor:
    """Return the skip connection's output, computed entry by entry."""
    assert sae.W_skip is not None
    part = torch.zeros(len(x), D_OUT, dtype=torch.float64)
    for i in range(12):
        for j in range(D_OUT):
            part[:, j] += (x[:, i] - sae.x_mean[i]) * sae.W_skip[i, j].detach()
    return part


@pytest.mark.parametrize("kind", TRANSCODERS)
def test_the_other_weights_learn_from_the_target_minus_the_skip_output(kind: str) -> None:
    sae, plain, x, y = random_transcoder(kind), random_transcoder(kind, skip=False), batch(), batch(33, D_OUT, seed=5)
    for one in (sae, plain):
        one.n_tokens_since_fired[3:9] = 1000
    output, expected = sae(x, y), plain(x, y - of_skip(sae, x))
    torch.testing.assert_close(output.x_hat, expected.x_hat + of_skip(sae, x))
    assert_same(output.losses, expected.losses)
    if "auxk" in expected.losses:
        assert expected.losses["auxk"] > 0
    grads = gradients(sae, sae.objective(output.losses))
    del grads["W_skip"]
    assert_same(grads, gradients(plain, plain.objective(expected.losses)))


@pytest.mark.parametrize("kind", TRANSCODERS)
def test_skip_connection_gradients_match_finite_differences(kind: str) -> None:
    sae, x, y = random_transcoder(kind), batch(), batch(33, D_OUT, seed=5)
    assert sae.W_skip is not None
    gradient = gradients(sae, sae.objective(sae(x, y).losses))["W_skip"]
    differences = torch.zeros_like(gradient)
    # The loss is quadratic in W_skip, so central differences are exact.
    for i in range(12):
        for j in range(D_OUT):
            ends = []
            for step in (0.5, -1.0):
                sae.W_skip.data[i, j] += step
                ends.append(sae.objective(sae(x, y).losses).item())
            sae.W_skip.data[i, j] += 0.5
            differences[i, j] = ends[0] - ends[1]
    torch.testing.assert_close(gradient, differences)


def test_the_skip_connection_is_not_normalised_and_belongs_to_no_latent() -> None:
    sae, x, y = random_transcoder("batch_topk"), batch(), batch(33, D_OUT, seed=5)
    assert sae.W_skip is not None
    before = sae.W_skip.detach().clone()
    sae.objective(sae(x, y).losses).backward()
    assert sae.W_skip.grad is not None
    gradient = sae.W_skip.grad.clone()
    sae.project_gradient()
    sae.constrain()
    assert torch.equal(sae.W_skip, before)
    assert torch.equal(sae.W_skip.grad, gradient)
    assert "W_skip" not in sae.latent_dims()


def test_a_resampled_latent_writes_what_the_skip_connection_leaves_unexplained() -> None:
    sae, x, y = random_transcoder("batch_topk"), batch(1), batch(1, D_OUT, seed=5)
    sae.n_tokens_since_fired[3] = 1000
    resample(sae, x, y, torch.Generator().manual_seed(0))
    left = torch.nn.functional.normalize(y - of_skip(sae, x) - sae.b_dec, dim=1)[0]
    torch.testing.assert_close(torch.nn.functional.normalize(sae.W_dec[3], dim=0), left)


@pytest.mark.parametrize("kind", slow_except(["batch_topk", "jumprelu"], TRANSCODERS))
def test_the_skip_connection_learns_the_linear_part_of_the_data(kind: str) -> None:
    torch.manual_seed(0)
    # The data's mean is far from 0, and its scale is not 1.
    x, map_ = torch.randn(4000, 12) * 5 + 20, torch.randn(12, D_OUT)
    data = [(rows, rows @ map_ + 3) for rows in x.split(500)]
    settings = {"architecture": kind, "d_sae": 48, "k": 2, "lr": 1e-2, "log_every": 20, "device": "cpu"}
    assert train(data, n_steps=200, skip=True, **settings).values["fvu"] < 0.01


def test_the_skip_connection_is_initially_zero() -> None:
    sae = new_sae(BatchTopK, 12, 40, D_OUT, k=3, has_skip=True)
    assert sae.W_skip.shape == (12, D_OUT)
    assert not sae.W_skip.any()


def test_the_error_for_a_skip_connection_in_an_sae_suggests_a_fix() -> None:
    rows = torch.randn(200, 12)
    with pytest.raises(UserError, match=r"^sae\.skip: only a transcoder has a skip .*; give data.target_path, or set"):
        train([rows], n_steps=1, skip=True, device="cpu")
