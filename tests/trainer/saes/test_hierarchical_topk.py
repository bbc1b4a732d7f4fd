from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.saes import assert_same, batch, gradients, random_sae
from torch import Tensor

from trainer.saes.hierarchical_topk import HierarchicalTopK


def random_hierarchical(*shape: int, **settings: Any) -> HierarchicalTopK:
    sae = random_sae(HierarchicalTopK, *shape, **({"k": 8, "n_levels": 3, "k_aux": 4} | settings))
    sae.auxk.residual_variance.fill_(0.7)
    return sae


def naive_losses(sae: HierarchicalTopK, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the squared errors in the paper's loss, which reconstructs from the k largest activations for each k."""
    pre_acts = (x if sae.is_transcoder else x - sae.b_dec) @ sae.W_enc + sae.b_enc
    errors = []
    for k in sae.settings.ks:
        values, latents = pre_acts.topk(k, dim=1)
        acts = torch.zeros_like(pre_acts).scatter(1, latents, values.relu())
        errors.append((y - acts @ sae.W_dec - sae.b_dec).square().sum())
    return {"mse": errors[-1], "inner_mse": sum(errors[:-1], torch.zeros(()))}


@pytest.mark.parametrize("shape", [(12, 40), (12, 40, 7)])
@pytest.mark.parametrize(("k", "n_levels"), [(8, 3), (20, 1), (21, 4), (1, 3), (40, 2)])
def test_every_loss_term_and_gradient_matches_a_dense_loop(shape: tuple[int, ...], k: int, n_levels: int) -> None:
    sae, x = random_hierarchical(*shape, k=k, n_levels=n_levels), batch()
    y = batch(d_in=7, seed=5) if sae.is_transcoder else x
    output, naive = sae(x, y), naive_losses(sae, x, y)
    for name, loss in naive.items():
        torch.testing.assert_close(output.losses[name].double(), loss.double())
        if loss.requires_grad:
            assert_same(gradients(sae, output.losses[name]), gradients(sae, loss))
    mean = (naive["mse"] + naive["inner_mse"]) / len(sae.settings.ks)
    torch.testing.assert_close(sae.objective(output.losses), mean / 3.0 + output.losses["auxk"] / 32)


@given(st.integers(1, 40), st.integers(1, 16))
@settings(max_examples=50)
def test_each_level_has_half_as_many_latents_as_the_next(k: int, n_levels: int) -> None:
    ks = random_hierarchical(k=k, n_levels=n_levels).settings.ks
    assert ks[-1] == k
    assert all(small == large // 2 for small, large in itertools.pairwise(ks))
    assert len(ks) == min(n_levels, k.bit_length())
