from __future__ import annotations

from typing import Any

import pytest
import torch
from support.saes import assert_same, batch, gradients, new_sae, peers_losses, peers_twin, random_sae
from torch import Tensor

from trainer.saes.matryoshka import MatryoshkaBatchTopK
from trainer.saes.nested import _PrefixErrors
from trainer.saes.sparse_acts import DenseActs


def random_matryoshka(*shape: int, **settings: Any) -> MatryoshkaBatchTopK:
    defaults = {"k": 5, "n_levels": 4, "k_aux": 4, "auxk_alpha": 1 / 32, "threshold_rate": 0.25}
    sae = random_sae(MatryoshkaBatchTopK, *shape, **(defaults | settings))
    sae.auxk.residual_variance.fill_(0.7)
    return sae


def naive_losses(sae: MatryoshkaBatchTopK, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    centred = x if sae.is_transcoder else x - sae.b_dec
    pre_acts = centred @ sae.W_enc + sae.b_enc
    smallest = pre_acts.flatten().sort().values[-sae.k * len(x)]
    acts = (pre_acts * (pre_acts >= smallest)).relu()
    errors = []
    for width in sae.widths:
        x_hat = sae.b_dec.expand_as(y)
        for latent in range(width):
            x_hat = x_hat + acts[:, latent : latent + 1] * sae.W_dec[latent]
        errors.append((y - x_hat).square().sum())
    losses = {"mse": errors[-1], "inner_mse": sum(errors[:-1], torch.zeros(()))}
    of_dead = pre_acts.masked_fill(~sae.dead(), -torch.inf)
    values, latents = of_dead.topk(sae.auxk.k_aux, dim=1)
    aux_x_hat = torch.zeros_like(pre_acts).scatter(1, latents, values.relu()) @ sae.W_dec
    losses["auxk"] = ((y - x_hat).detach() - aux_x_hat).square().sum() / sae.auxk.residual_variance
    return losses, x_hat


@pytest.mark.parametrize("shape", [(12, 40), (12, 40, 7)])
@pytest.mark.parametrize("n_levels", [1, 2, 4])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_every_loss_term_and_gradient_matches_a_dense_loop(shape: tuple[int, ...], n_levels: int, k: int) -> None:
    sae, x = random_matryoshka(*shape, n_levels=n_levels, k=k), batch()
    y = batch(d_in=7, seed=5) if sae.is_transcoder else x
    sae.n_tokens_since_fired[3:9] = 1000
    output, (naive, naive_x_hat) = sae(x, y), naive_losses(sae, x, y)
    torch.testing.assert_close(output.x_hat, naive_x_hat)
    assert_same(
        {name: loss.double() for name, loss in output.losses.items()}, {k: v.double() for k, v in naive.items()}
    )
    for name in naive:
        if naive[name].requires_grad:
            assert_same(gradients(sae, output.losses[name]), gradients(sae, naive[name]))
    expected = (naive["mse"] + naive["inner_mse"]) / n_levels / 3.0 + naive["auxk"] / 32
    torch.testing.assert_close(sae.objective(output.losses), expected)
    assert_same(gradients(sae, sae.objective(output.losses)), gradients(sae, expected))


def test_the_saelens_training_class_has_the_same_losses_and_gradients() -> None:
    # Our class and SAELens's class agree under three conditions: SAELens gets our widths as its matryoshka_widths, its
    # per-level AuxK is disabled, and decoder rows have norm 1. SAELens sums the errors of the levels, whereas our loss
    # averages them.
    pytest.importorskip("sae_lens")
    from sae_lens.saes.matryoshka_batchtopk_sae import (
        MatryoshkaBatchTopKTrainingSAE,
        MatryoshkaBatchTopKTrainingSAEConfig,
    )

    sae, x = random_matryoshka(), batch()
    settings = {"k": 5, "matryoshka_widths": list(sae.widths), "use_matryoshka_aux_loss": False}
    twin = peers_twin(MatryoshkaBatchTopKTrainingSAE, MatryoshkaBatchTopKTrainingSAEConfig, sae, **settings)
    output, theirs = sae(x, x), peers_losses(twin, x)
    inner = sum(theirs[f"inner_mse_loss_{width}"] for width in sae.widths[:-1])
    for ours, loss in (("mse", theirs["mse_loss"]), ("inner_mse", inner)):
        torch.testing.assert_close(output.losses[ours], loss * len(x))
    whole = theirs["loss"] * len(x) / len(sae.widths) / sae.y_variance
    torch.testing.assert_close(sae.objective(output.losses), whole)
    assert_same(gradients(sae, sae.objective(output.losses)), gradients(twin, whole))


@pytest.mark.parametrize(
    ("d_sae", "n_levels", "expected"),
    [(3072, 5, [192, 384, 768, 1536, 3072]), (40, 1, [40]), (41, 3, [11, 21, 41]), (3, 5, [1, 2, 3]), (1, 5, [1])],
)
def test_every_level_is_about_twice_as_wide_as_the_previous_one(d_sae: int, n_levels: int, expected: list[int]) -> None:
    sae = random_matryoshka(12, d_sae, k=1, n_levels=n_levels)
    assert sae.widths == expected
    x = batch(4)
    assert sae(x, x).losses["inner_mse"].isfinite()


def test_tokens_and_levels_without_active_latents_are_reconstructed_correctly() -> None:
    sae, x = random_matryoshka(k=1), batch()
    sae.b_enc.data[:20] = -1e6
    x[3] = sae.b_dec.detach()
    sae.b_enc.data[20:] = -1e-3
    output, (naive, naive_x_hat) = sae(x, x), naive_losses(sae, x, x)
    assert output.acts.per_token(output.acts.values)[3] == 0
    torch.testing.assert_close(output.x_hat, naive_x_hat)
    torch.testing.assert_close(output.losses["inner_mse"], naive["inner_mse"])


def test_evaluation_measures_inner_levels_for_dense_and_sparse_activations() -> None:
    sae, x = random_matryoshka().eval(), batch(200)
    pre_acts = (x - sae.b_dec) @ sae.W_enc + sae.b_enc
    # The threshold is halfway between two values, so rounding does not change which values are above it.
    sparse = pre_acts.flatten().topk(301).values[-2:].mean().item()
    for threshold, is_dense in ((0.0, True), (sparse, False)):
        sae.threshold.fill_(threshold)
        output = sae(x, x)
        assert isinstance(output.acts, DenseActs) is is_dense
        acts = pre_acts * (pre_acts > threshold)
        errors = [(x - acts[:, :width] @ sae.W_dec[:width] - sae.b_dec).square().sum() for width in sae.widths]
        torch.testing.assert_close(output.losses["inner_mse"], sum(errors[:-1]))
        torch.testing.assert_close(output.losses["mse"], errors[-1])


def left_over_by_the_first(n_levels: int, width: int) -> float:
    """Train briefly on sparse sums of 30 directions, and return the FVU with only the first `width` latents."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(30, 16, generator=generator), dim=1)
    x = (torch.rand(400, 30, generator=generator) * (torch.rand(400, 30, generator=generator) < 0.1)) @ directions
    sae = new_sae(MatryoshkaBatchTopK, 16, 32, k=4, n_levels=n_levels, auxk_alpha=0.0)
    sae.W_dec.data = torch.nn.functional.normalize(torch.randn(32, 16, generator=generator), dim=1)
    sae.W_enc.data = sae.W_dec.T.clone()
    optimizer = torch.optim.Adam(sae.parameters(), 3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        (sae.objective(sae(x, x).losses) / len(x)).backward()
        optimizer.step()
        sae.normalise_decoder()
    x_hat = sae(x, x).acts.dense()[:, :width] @ sae.W_dec[:width] + sae.b_dec
    return ((x - x_hat).square().sum() / (x - x.mean(dim=0)).square().sum()).item()


def test_the_first_latents_reconstruct_more_with_five_levels_than_with_one_level() -> None:
    assert left_over_by_the_first(5, width=8) < 0.85 * left_over_by_the_first(1, width=8)


def test_the_inner_levels_error_is_exact_for_a_large_batch() -> None:
    parts, y = torch.randn(4096, 3, 256), torch.randn(4096, 256)
    _, inner_mse = _PrefixErrors.apply(parts, torch.zeros(256), y)
    errors = parts.double().cumsum(dim=1)[:, :-1] - y.double()[:, None]
    assert float(inner_mse) == pytest.approx(float(errors.square().sum()), rel=1e-5)
