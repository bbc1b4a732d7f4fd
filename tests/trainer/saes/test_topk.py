from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.losses import auxk_error
from trainer.saes.sparse import SparseActs
from trainer.saes.topk import TopK

PARAMETERS = ("W_enc", "b_enc", "W_dec", "b_dec")


def random_topk(d_in: int = 12, d_sae: int = 40, **knobs: Any) -> TopK:
    """A float64 TopK with random weights, unit decoder rows and none of its latents dead."""
    sae = TopK(d_in, d_sae, **({"k": 5, "k_aux": 4, "auxk_alpha": 1 / 32, "dead_after_tokens": 100} | knobs)).double()
    torch.manual_seed(1)
    for name in PARAMETERS:
        torch.nn.init.normal_(getattr(sae, name), std=0.5)
    sae.normalise_decoder()
    sae.x_variance.fill_(3.0)
    sae.residual_variance.fill_(0.7)
    return sae


def batch(n_tokens: int = 33, d_in: int = 12) -> Tensor:
    return torch.randn(n_tokens, d_in, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def gradients(sae: TopK, loss: Tensor) -> dict[str, Tensor]:
    return dict(zip(PARAMETERS, torch.autograd.grad(loss, [getattr(sae, name) for name in PARAMETERS]), strict=True))


def dense_topk(pre_acts: Tensor, k: int) -> Tensor:
    values, indices = pre_acts.topk(k, dim=1)
    return torch.zeros_like(pre_acts).scatter(1, indices, values.relu())


def naive_loss(sae: TopK, x: Tensor) -> tuple[Tensor, Tensor]:
    """The objective and x_hat by dense products and plain autograd, AuxK over all dead latents."""
    pre_acts = (x - sae.b_dec) @ sae.W_enc + sae.b_enc
    x_hat = dense_topk(pre_acts, sae.k) @ sae.W_dec + sae.b_dec
    loss = (x - x_hat).square().sum() / sae.x_variance
    dead = sae.dead()
    if dead.any():
        of_dead = pre_acts.masked_fill(~dead, -torch.inf)
        aux_x_hat = dense_topk(of_dead, sae.k_aux) @ sae.W_dec
        error = ((x - x_hat).detach() - aux_x_hat).square().sum()
        loss = loss + sae.auxk_alpha * error / sae.residual_variance
    return loss, x_hat


@pytest.mark.parametrize("n_dead", [0, 1, 6, 8])
def test_the_sparse_step_equals_the_dense_one_in_value_and_every_gradient(n_dead: int) -> None:
    sae, x = random_topk(), batch()
    sae.n_tokens_since_fired[3 : 3 + n_dead] = 1000
    output = sae(x)
    loss, (naive, naive_x_hat) = sae.objective(output.losses), naive_loss(sae, x)

    torch.testing.assert_close(output.x_hat, naive_x_hat)
    torch.testing.assert_close(loss, naive)
    expected = gradients(sae, naive)
    for name, gradient in gradients(sae, loss).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_a_negative_pre_activation_among_the_k_largest_is_inactive_and_gets_no_gradient() -> None:
    sae, x = random_topk(k=30), batch()
    output = sae(x)
    assert (output.acts.values == 0).any()
    expected = gradients(sae, naive_loss(sae, x)[0])
    for name, gradient in gradients(sae, sae.objective(output.losses)).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_a_latent_that_never_fires_gets_no_gradient_from_the_reconstruction() -> None:
    sae = random_topk()
    sae.b_enc.data[7] = -1e6
    found = gradients(sae, sae.objective(sae(batch()).losses))
    assert found["W_dec"][7].abs().max() == 0
    assert found["W_enc"][:, 7].abs().max() == 0


def test_auxk_reaches_encoder_and_decoder_of_dead_latents_and_only_theirs() -> None:
    sae = random_topk()
    dead = [2, 11, 30]
    sae.n_tokens_since_fired[dead] = 1000
    found = gradients(sae, sae(batch()).losses["auxk"])
    touched = found["W_enc"].abs().sum(dim=0) > 0
    assert touched.nonzero().flatten().tolist() == dead
    assert (found["W_dec"].abs().sum(dim=1) > 0).nonzero().flatten().tolist() == dead


def test_auxk_is_nothing_without_dead_latents_when_switched_off_and_outside_training() -> None:
    alive, off, evaluated = random_topk(), random_topk(auxk_alpha=0.0), random_topk().eval()
    for sae in (off, evaluated):
        sae.n_tokens_since_fired[:] = 1000
    for sae in (alive, off, evaluated):
        assert sae(batch()).losses["auxk"] == 0


def test_of_many_dead_latents_those_silent_for_longest_are_candidates() -> None:
    sae = random_topk(k_aux=3)
    sae.n_tokens_since_fired[:] = torch.arange(sae.d_sae) + 200
    found = gradients(sae, sae(batch(400)).losses["auxk"])
    touched = (found["W_enc"].abs().sum(dim=0) > 0).nonzero().flatten()
    assert touched.tolist() == list(range(sae.d_sae - 6, sae.d_sae))


def test_auxk_does_not_pull_the_living_towards_what_suits_the_dead() -> None:
    residual = torch.randn(4, 3, requires_grad=True)
    aux_x_hat = torch.randn(4, 3, requires_grad=True)
    auxk_error(residual, aux_x_hat, torch.tensor(2.0)).backward()
    assert residual.grad is None
    assert aux_x_hat.grad is not None


def test_silence_is_counted_in_the_tokens_of_the_whole_step_until_a_latent_is_dead() -> None:
    sae, x = random_topk(), batch()
    sae.b_enc.data[5] = -1e6
    acts = sae(x).acts
    fired = torch.zeros(sae.d_sae, dtype=torch.bool)
    fired[acts.indices[acts.values > 0]] = True
    assert fired.any()
    assert not fired[5]
    sae.end_step(n_tokens=80)
    assert sae.n_tokens_since_fired.tolist() == torch.where(fired, 0, 80).tolist()
    assert not sae.dead().any()
    sae(x)
    sae.end_step(n_tokens=80)
    assert torch.equal(sae.dead(), ~fired)


def test_the_residual_variance_of_a_step_serves_the_next() -> None:
    sae, x = random_topk(), batch()
    mse = sae(x).losses["mse"]
    sae.end_step(len(x))
    torch.testing.assert_close(sae.residual_variance, mse.detach() / len(x))


def test_the_gradient_that_would_only_stretch_decoder_rows_is_removed() -> None:
    sae = random_topk()
    sae.objective(sae(batch()).losses).backward()
    before = sae.W_dec.grad.clone()
    sae.project_gradient()
    assert (before * sae.W_dec).sum(dim=1).abs().max() > 1e-3
    torch.testing.assert_close((sae.W_dec.grad * sae.W_dec).sum(dim=1), torch.zeros(sae.d_sae, dtype=torch.float64))


def test_bf16_autocast_changes_little_and_leaves_fp32_gradients() -> None:
    sae, x = random_topk().float(), batch().float()
    exact = sae.objective(sae(x).losses)
    with torch.autocast("cpu", torch.bfloat16):
        losses = sae(x).losses
    loss = sae.objective(losses)
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0)
    assert {gradient.dtype for gradient in gradients(sae, loss).values()} == {torch.float32}


def test_sparse_activations_can_be_made_dense() -> None:
    acts = SparseActs(torch.tensor([[2.0, 0.0], [1.0, 3.0]]), torch.tensor([[4, 1], [0, 2]]))
    assert acts.dense(5).tolist() == [[0, 0, 0, 0, 2], [1, 0, 3, 0, 0]]
