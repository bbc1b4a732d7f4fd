from __future__ import annotations

from typing import Any

import pytest
import torch
from support.saes import assert_same, batch, gradients, peers_losses, peers_twin, random_sae
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.saes.auxk import AuxK, DeadCandidates
from trainer.saes.base import Sae
from trainer.saes.kernels.dead_latents import Weights
from trainer.saes.losses import auxk_error
from trainer.saes.topk import TopK


def random_topk(**settings: Any) -> TopK:
    sae = random_sae(TopK, **({"k": 5, "k_aux": 4, "auxk_alpha": 1 / 32} | settings))
    sae.auxk.residual_variance.fill_(0.7)
    return sae


def run(sae: TopK, x: Tensor) -> Any:
    return sae(x, x)


def k_largest(pre_acts: Tensor, k: int) -> Tensor:
    """Keep each token's k largest positive pre-activations, and set all others to zero."""
    acts = torch.zeros_like(pre_acts)
    for token, row in enumerate(pre_acts):
        for latent in row.argsort(descending=True)[:k]:
            acts[token, latent] = row[latent].clamp_min(0)
    return acts


def naive_losses(sae: TopK, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Compute the losses and x_hat with dense matmuls and plain autograd, with AuxK over all dead latents."""
    pre_acts = (x - sae.b_dec) @ sae.W_enc + sae.b_enc
    x_hat = k_largest(pre_acts, sae.k) @ sae.W_dec + sae.b_dec
    losses = {"mse": (x - x_hat).square().sum(), "auxk": torch.zeros((), dtype=x.dtype)}
    if sae.dead().any():
        of_dead = pre_acts.masked_fill(~sae.dead(), -torch.inf)
        aux_x_hat = k_largest(of_dead, sae.auxk.k_aux) @ sae.W_dec
        losses["auxk"] = ((x - x_hat).detach() - aux_x_hat).square().sum() / sae.auxk.residual_variance
    return losses, x_hat


@pytest.mark.parametrize("n_dead", [0, 1, 6, 8])
def test_every_loss_term_and_gradient_matches_a_dense_loop(n_dead: int) -> None:
    sae, x = random_topk(), batch()
    sae.n_tokens_since_fired[3 : 3 + n_dead] = 1000
    output, (naive, naive_x_hat) = run(sae, x), naive_losses(sae, x)
    torch.testing.assert_close(output.x_hat, naive_x_hat)
    assert_same(output.losses, naive)
    for name in naive:
        if naive[name].requires_grad:
            assert_same(gradients(sae, output.losses[name]), gradients(sae, naive[name]))
    expected = naive["mse"] / 3.0 + naive["auxk"] / 32
    torch.testing.assert_close(sae.objective(output.losses), expected)


def test_a_negative_pre_activation_in_the_top_k_is_inactive_and_has_no_gradient() -> None:
    sae, x = random_topk(k=30), batch()
    output = run(sae, x)
    assert (output.acts.values == 0).any()
    assert_same(gradients(sae, output.losses["mse"]), gradients(sae, naive_losses(sae, x)[0]["mse"]))


@pytest.mark.parametrize("rescales", [False, True])
@pytest.mark.parametrize("has_dead", [False, True])
def test_the_saelens_training_class_has_the_same_losses_and_gradients(rescales: bool, has_dead: bool) -> None:
    # Our class and SAELens's class agree under three conditions.
    # Decoder rows have unit norm, because SAELens ranks latents by act · ‖W_dec‖.
    # At most k_aux = d_in / 2 latents are dead.
    # The activations of dead latents are positive, because SAELens applies no ReLU to them.
    # SAELens's AuxK loss is a plain squared error, whereas ours is divided by the residual variance.
    pytest.importorskip("sae_lens")
    from sae_lens.saes.topk_sae import TopKTrainingSAE, TopKTrainingSAEConfig

    sae, x = random_topk(k_aux=None), batch()
    if has_dead:
        sae.n_tokens_since_fired[10:16] = 1000
        sae.W_enc.data[:, 10:16] *= 0.01
        sae.b_enc.data[10:16] = 0.3
    twin = peers_twin(
        TopKTrainingSAE,
        TopKTrainingSAEConfig,
        sae,
        k=5,
        aux_loss_coefficient=1.0,
        rescale_acts_by_decoder_norm=rescales,
    )
    output, theirs = run(sae, x), peers_losses(twin, x, sae.dead())
    torch.testing.assert_close(output.acts.dense(), theirs["acts"])
    pairs = {"mse": theirs["mse_loss"], "auxk": theirs["auxiliary_reconstruction_loss"] / 0.7}
    for name, loss in pairs.items():
        torch.testing.assert_close(output.losses[name], loss * len(x))
        if name == "mse" or has_dead:
            assert_same(gradients(sae, output.losses[name]), gradients(twin, loss * len(x)))


def test_a_latent_that_never_fires_gets_no_gradient_from_the_reconstruction() -> None:
    sae = random_topk()
    sae.b_enc.data[7] = -1e6
    grads = gradients(sae, sae.objective(run(sae, batch()).losses))
    assert grads["W_dec"][7].abs().max() == 0
    assert grads["W_enc"][:, 7].abs().max() == 0


def test_auxk_produces_gradients_only_for_the_weights_of_dead_latents() -> None:
    sae = random_topk()
    dead = [2, 11, 30]
    sae.n_tokens_since_fired[dead] = 1000
    grads = gradients(sae, run(sae, batch()).losses["auxk"])
    touched = grads["W_enc"].abs().sum(dim=0) > 0
    assert touched.nonzero().flatten().tolist() == dead
    assert (grads["W_dec"].abs().sum(dim=1) > 0).nonzero().flatten().tolist() == dead


def test_auxk_is_0_without_dead_latents_and_in_evaluation_and_if_disabled() -> None:
    alive, off, evaluated = random_topk(), random_topk(auxk_alpha=0.0), random_topk().eval()
    for sae in (off, evaluated):
        sae.n_tokens_since_fired[:] = 1000
    for sae in (alive, off, evaluated):
        assert run(sae, batch()).losses["auxk"] == 0


def test_the_auxk_candidates_are_the_dead_latents_that_fired_least_recently() -> None:
    sae = random_topk(k_aux=3)
    sae.n_tokens_since_fired[:] = torch.arange(sae.d_sae) + 200
    grads = gradients(sae, run(sae, batch(400)).losses["auxk"])
    touched = (grads["W_enc"].abs().sum(dim=0) > 0).nonzero().flatten()
    assert touched.tolist() == list(range(sae.d_sae - 6, sae.d_sae))


@pytest.mark.parametrize("n_dead", [0, 3])
def test_a_gpu_learns_the_same_without_knowing_the_number_of_dead_latents(
    n_dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def candidates(self: AuxK, sae: Sae, dtype: torch.dtype) -> DeadCandidates:
        longest = sae.n_tokens_since_fired.topk(2 * self.k_aux).indices
        is_dead = sae.dead()[longest]
        bias = torch.where(is_dead, sae.b_enc.detach()[longest], -torch.inf)
        rows = Weights(sae.W_enc.detach().T[longest], bias, sae.W_dec.detach()[longest])
        return DeadCandidates(longest, rows, is_dead.any() / self.residual_variance, self.k_aux, [])

    monkeypatch.setattr(AuxK, "candidates", candidates)
    monkeypatch.setattr(Sae, "may_have_dead", lambda sae: True)
    sae, x = random_topk(), batch()
    sae.n_tokens_since_fired[7 : 7 + n_dead] = 1000
    output, (naive, _) = run(sae, x), naive_losses(sae, x)
    assert_same(output.losses, naive)
    expected = gradients(sae, naive["auxk"]) if n_dead else {k: torch.zeros_like(p) for k, p in sae.named_parameters()}
    assert_same(gradients(sae, output.losses["auxk"]), expected)


def test_auxk_does_not_propagate_gradients_to_the_error_of_live_latents() -> None:
    error = torch.randn(4, 3, requires_grad=True)
    explained = torch.randn(4, 3, requires_grad=True)
    auxk_error(error, explained, torch.tensor(0.5)).backward()
    assert error.grad is None
    torch.testing.assert_close(explained.grad, explained + error)


def test_a_step_updates_the_residual_variance_and_a_skipped_step_does_not() -> None:
    sae, x = random_topk(), batch()
    mse = run(sae, x).losses["mse"]
    sae.end_step(sae.n_tokens_in_step())
    torch.testing.assert_close(sae.auxk.residual_variance, mse.detach() / len(x))
    before = sae.auxk.residual_variance.clone()
    sae.end_step(sae.n_tokens_in_step())
    assert torch.equal(sae.auxk.residual_variance, before)


def test_k_falls_linearly_over_the_first_part_of_a_run() -> None:
    sae = random_topk(k=4, k_anneal_fraction=0.5)
    counts = []
    # The fractions are not in order, because a resumed run starts in the middle.
    for progress in (0.75, 0.0, 0.25, 0.5, 0.375):
        sae.begin_step(progress)
        counts.append(run(sae, batch(3)).acts.values.numel() / 3)
    assert counts == [4, 12, 8, 4, 6]
    sae.begin_step(0.0)
    sae.eval()
    assert run(sae, batch(3)).acts.values.numel() == 3 * 4


def test_annealing_starts_at_the_given_k_but_never_above_d_sae() -> None:
    for start, expected in ((20, 20), (1000, 40)):
        sae = random_topk(k_anneal_fraction=0.1, k_anneal_start=start)
        sae.begin_step(0.0)
        assert run(sae, batch(2)).acts.values.numel() == 2 * expected
    sae = random_topk(k_anneal_start=20)
    sae.begin_step(0.0)
    assert run(sae, batch(2)).acts.values.numel() == 2 * 5


def test_a_k_above_the_number_of_latents_is_refused() -> None:
    with pytest.raises(UserError, match=r"^sae\.k: must be at most the number of latents, 40, not 41$"):
        random_topk(k=41)


def test_bf16_autocast_barely_changes_results_and_keeps_gradients_in_fp32() -> None:
    sae, x = random_topk().float(), batch().float()
    exact = sae.objective(run(sae, x).losses)
    with torch.autocast("cpu", torch.bfloat16):
        losses = run(sae, x).losses
    loss = sae.objective(losses)
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0)
    assert {gradient.dtype for gradient in gradients(sae, loss).values()} == {torch.float32}
