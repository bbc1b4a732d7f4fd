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
from trainer.saes.sparse_acts import SparseActs


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
    mean = (1.5 * naive["mse"] + naive["inner_mse"]) / (len(sae.settings.ks) + 0.5)
    torch.testing.assert_close(sae.objective(output.losses), mean / 3.0 + output.losses["auxk"] / 32)


@given(st.integers(1, 40), st.integers(1, 16))
@settings(max_examples=50)
def test_each_level_has_half_as_many_latents_as_the_next(k: int, n_levels: int) -> None:
    ks = random_hierarchical(k=k, n_levels=n_levels).settings.ks
    assert ks[-1] == k
    assert all(small == large // 2 for small, large in itertools.pairwise(ks))
    assert len(ks) == min(n_levels, k.bit_length())


def test_a_level_has_exactly_its_number_of_latents_even_if_values_are_equal() -> None:
    sae, x = random_hierarchical(k=12, n_levels=3), batch()
    # Equal columns make pairs of latents fire equally strongly.
    sae.W_enc.data[:, 1::2] = sae.W_enc.data[:, ::2]
    sae.b_enc.data[1::2] = sae.b_enc.data[::2]
    acts = sae.train()(x, x).acts
    assert isinstance(acts, SparseActs)
    grouped = sae._by_level(acts).indices
    sizes = grouped.tokens.bincount(minlength=3 * len(x)).view(len(x), 3)
    assert (sizes == torch.tensor([3, 3, 6])).all()
    for token, values in enumerate(acts.values.view(len(x), 12)):
        assert (values.diff() <= 0).all(), token


def test_an_empty_batch_is_encoded() -> None:
    sae, x = random_hierarchical(), batch(0)
    assert sae(x, x).x_hat.shape == (0, 12)


@pytest.mark.parametrize("k_anneal_start", [1, 3, 7, 40])
def test_levels_are_correct_while_k_is_annealed(k_anneal_start: int) -> None:
    sae, x = random_hierarchical(k=16, n_levels=3, k_anneal_fraction=0.5, k_anneal_start=k_anneal_start), batch()
    sae.start_step(0.0)
    errors = []
    pre_acts = (x - sae.b_dec) @ sae.W_enc + sae.b_enc
    for k in [*(min(k, k_anneal_start) for k in sae.settings.ks[:-1]), k_anneal_start]:
        values, latents = pre_acts.topk(k, dim=1)
        acts = torch.zeros_like(pre_acts).scatter(1, latents, values.relu())
        errors.append((x - acts @ sae.W_dec - sae.b_dec).square().sum())
    losses = sae(x, x).losses
    torch.testing.assert_close(losses["mse"], errors[-1])
    torch.testing.assert_close(losses["inner_mse"], sum(errors[:-1], torch.zeros(())))
