from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.saes import assert_same, batch, gradients, peers_losses, peers_twin, random_sae
from torch import Tensor

from trainer.contract.settings.job import JobConfig
from trainer.saes.batch_topk import BatchTopK
from trainer.saes.sparse_acts import DenseActs, SparseActs
from trainer.training.loop import Trainer


def random_batch_topk(*shape: int, **settings: Any) -> BatchTopK:
    sae = random_sae(
        BatchTopK, *shape, **({"k": 5, "k_aux": 4, "auxk_alpha": 1 / 32, "threshold_rate": 0.25} | settings)
    )
    sae.auxk.residual_variance.fill_(0.7)
    return sae


def largest_of_batch(pre_acts: Tensor, k: int) -> Tensor:
    """Keep the k · n_tokens largest positive pre-activations, one by one, and set all others to zero."""
    acts = torch.zeros_like(pre_acts)
    for place in pre_acts.flatten().argsort(descending=True)[: k * len(pre_acts)].tolist():
        token, latent = divmod(place, pre_acts.shape[1])
        acts[token, latent] = pre_acts[token, latent].clamp_min(0)
    return acts


def naive_losses(sae: BatchTopK, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    centred = x if sae.is_transcoder else x - sae.b_dec
    pre_acts = centred @ sae.W_enc + sae.b_enc
    x_hat = largest_of_batch(pre_acts, sae.k) @ sae.W_dec + sae.b_dec
    losses = {"mse": (y - x_hat).square().sum(), "auxk": torch.zeros((), dtype=x.dtype)}
    if sae.dead().any():
        of_dead = pre_acts.masked_fill(~sae.dead(), -torch.inf)
        values, latents = of_dead.topk(sae.auxk.k_aux, dim=1)
        aux_x_hat = torch.zeros_like(pre_acts).scatter(1, latents, values.relu()) @ sae.W_dec
        losses["auxk"] = ((y - x_hat).detach() - aux_x_hat).square().sum() / sae.auxk.residual_variance
    return losses, x_hat


@pytest.mark.parametrize("n_dead", [0, 1, 8])
@pytest.mark.parametrize("shape", [(12, 40), (12, 40, 7)])
@pytest.mark.parametrize("k", [1, 5, 24, 40])
def test_every_loss_term_and_gradient_matches_a_dense_loop(n_dead: int, shape: tuple[int, ...], k: int) -> None:
    sae, x = random_batch_topk(*shape, k=k), batch()
    y = batch(d_in=7, seed=5) if sae.is_transcoder else x
    sae.n_tokens_since_fired[3 : 3 + n_dead] = 1000
    output, (naive, naive_x_hat) = sae(x, y), naive_losses(sae, x, y)
    torch.testing.assert_close(output.x_hat, naive_x_hat)
    assert_same(output.losses, naive)
    for name in naive:
        if naive[name].requires_grad:
            assert_same(gradients(sae, output.losses[name]), gradients(sae, naive[name]))
    torch.testing.assert_close(sae.objective(output.losses), naive["mse"] / 3.0 + naive["auxk"] / 32)


@pytest.mark.parametrize("rescales", [False, True])
def test_the_saelens_training_class_has_the_same_losses_gradients_and_threshold(rescales: bool) -> None:
    # Our class and SAELens's class agree under three conditions: decoder rows have unit norm, at most k_aux = d_in / 2
    # latents are dead, and dead latents have positive activations. SAELens's AuxK loss is a plain squared error.
    # SAELens's threshold starts at 0. This test uses a rate of 1, so that the initial value has no effect.
    pytest.importorskip("sae_lens")
    from sae_lens.saes.batchtopk_sae import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig

    sae, x = random_batch_topk(k_aux=None), batch()
    sae.n_tokens_since_fired[10:16] = 1000
    sae.W_enc.data[:, 10:16] *= 0.01
    sae.b_enc.data[10:16] = 0.3
    settings = {"k": 5, "aux_loss_coefficient": 1.0, "rescale_acts_by_decoder_norm": rescales, "topk_threshold_lr": 1.0}
    twin = peers_twin(BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig, sae, **settings)
    output, theirs = sae(x, x), peers_losses(twin, x, sae.dead())
    torch.testing.assert_close(output.acts.dense(), theirs["acts"])
    torch.testing.assert_close(output.x_hat, theirs["x_hat"])
    pairs = {"mse": theirs["mse_loss"], "auxk": theirs["auxiliary_reconstruction_loss"] / 0.7}
    for name, loss in pairs.items():
        torch.testing.assert_close(output.losses[name], loss * len(x))
        assert_same(gradients(sae, output.losses[name]), gradients(twin, loss * len(x)))
    sae.end_step(sae.n_tokens_in_step())
    torch.testing.assert_close(sae.threshold, twin.topk_threshold)


def test_tokens_with_larger_activations_get_more_active_latents() -> None:
    sae, x = random_batch_topk(), batch()
    x[::2] *= 10
    output = sae(x, x)
    per_token = output.acts.per_token((output.acts.values > 0).double())
    assert per_token.sum() == 5 * len(x)
    assert per_token[::2].mean() > 2 * per_token[1::2].mean()


def test_fewer_than_k_latents_are_active_if_fewer_pre_activations_are_positive() -> None:
    sae, x = random_batch_topk(), batch()
    sae.b_enc.data[3:] = -1e6
    output = sae(x, x)
    assert 0 < int((output.acts.values > 0).sum()) < 5 * len(x)
    assert_same(gradients(sae, output.losses["mse"]), gradients(sae, naive_losses(sae, x, x)[0]["mse"]))


def test_a_batch_without_positive_pre_activations_has_no_active_latents() -> None:
    sae, x = random_batch_topk(), batch()
    sae.b_enc.data[:] = -1e6
    output = sae(x, x)
    sae.objective(output.losses).backward()
    sae.end_step(sae.n_tokens_in_step())
    assert (sae.threshold, int((output.acts.values > 0).sum())) == (0, 0)
    torch.testing.assert_close(output.x_hat, sae.b_dec.expand(len(x), -1))


# Tests for the threshold.


def learn(sae: BatchTopK, x: Tensor) -> float:
    """Run a step without a weight update, and return the smallest active value in its batch."""
    values = sae(x, x).acts.values
    sae.end_step(sae.n_tokens_in_step())
    return values[values > 0].min().item()


def test_the_threshold_is_a_running_average_that_starts_with_the_first_value() -> None:
    sae = random_batch_topk()
    first, second = (learn(sae, batch(seed=seed)) for seed in (3, 4))
    assert first != second
    assert float(sae.threshold) == pytest.approx(0.75 * first + 0.25 * second)


def test_the_threshold_is_weighted_by_the_tokens_in_micro_batches_and_on_ranks() -> None:
    parts = [batch(10, seed=3), batch(30, seed=4)]
    alone = [learn(random_batch_topk(), x) for x in parts]
    first, second = random_batch_topk(), random_batch_topk()
    first(parts[0], parts[0])
    second(parts[1], parts[1])
    # Simulate the exchange of sums between two ranks.
    first.step_sums.add_(second.step_sums)
    first.end_step(first.n_tokens_in_step())
    assert float(first.threshold) == pytest.approx(0.25 * alone[0] + 0.75 * alone[1])


def test_a_skipped_step_leaves_the_threshold_unchanged() -> None:
    for n_before in (0, 1):
        sae = random_batch_topk()
        for seed in range(n_before):
            learn(sae, batch(seed=seed))
        before = sae.threshold.clone()
        bad = batch()
        bad[3, 2] = torch.nan
        sae(bad, bad)
        sae.step_sums.zero_()
        sae.end_step(sae.n_tokens_in_step())
        assert torch.equal(sae.threshold, before)


def test_in_evaluation_exactly_the_latents_above_the_threshold_are_active() -> None:
    sae, x = random_batch_topk().eval(), batch(200)
    pre_acts = (x - sae.b_dec) @ sae.W_enc + sae.b_enc
    # As in SAELens's JumpReLU, a value equal to the threshold is inactive.
    sae.threshold.copy_(pre_acts.detach().flatten().topk(100).values[-1])
    output = sae(x, x)
    assert isinstance(output.acts, SparseActs)
    torch.testing.assert_close(output.acts.dense(), pre_acts * (pre_acts > sae.threshold))
    assert int((output.acts.values > 0).sum()) == 99
    torch.testing.assert_close(sae(x[:7], x[:7]).x_hat, output.x_hat[:7])


def test_many_activations_are_stored_in_a_dense_matrix_with_the_same_result() -> None:
    sae, x = random_batch_topk().eval(), batch()
    output = sae(x, x)
    assert isinstance(output.acts, DenseActs)
    pre_acts = (x - sae.b_dec) @ sae.W_enc + sae.b_enc
    torch.testing.assert_close(output.x_hat, pre_acts.relu() @ sae.W_dec + sae.b_dec)


def test_the_threshold_is_compared_in_fp32_under_bf16_autocast() -> None:
    sae, x = random_batch_topk().float().eval(), batch(200).float()
    with torch.autocast("cpu", torch.bfloat16):
        pre_acts = torch.addmm(sae.b_enc, x - sae.b_dec, sae.W_enc)
        highest = pre_acts.float().max()
        # The threshold differs from the largest value by less than bf16 can represent.
        sae.threshold.copy_(highest * (1 - 1e-4))
        assert sae.threshold.bfloat16() == highest
        assert int((sae(x, x).acts.values > 0).sum()) == 1


def test_about_k_latents_per_token_are_active_in_evaluation_after_training() -> None:
    sae = random_batch_topk(24, 400, k=8).float()
    for seed in range(30):
        learn(sae, batch(1024, 24, seed=seed).float())
    sae.eval()
    x = batch(4000, 24, seed=99).float()
    assert float((sae(x, x).acts.values > 0).sum() / len(x)) == pytest.approx(8, rel=0.03)


def test_a_state_dict_contains_the_threshold_and_the_residual_variance() -> None:
    old, new = random_batch_topk(), random_batch_topk()
    for seed in (3, 4):
        learn(old, batch(seed=seed))
    new.load_state_dict(old.state_dict())
    assert {"threshold", "auxk.residual_variance"} <= set(old.state_dict())
    x = batch(seed=6)
    for sae in (old, new):
        learn(sae, x)
    assert torch.equal(old.threshold, new.threshold)
    assert torch.equal(old.auxk.residual_variance, new.auxk.residual_variance)


def test_annealing_allows_a_fractional_k_per_token() -> None:
    sae, x = random_batch_topk(k=4, k_anneal_fraction=0.5, k_anneal_start=8), batch(30)
    counts = []
    for progress in (0.0, 0.1, 0.5, 1.0):
        sae.begin_step(progress)
        counts.append(sae(x, x).acts.values.numel())
    assert counts == [240, 216, 120, 120]


@pytest.mark.parametrize("architecture", ["batch_topk", "matryoshka_batch_topk"])
def test_a_resumed_run_is_bit_identical(
    architecture: str, make_job: Callable[..., JobConfig], make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    sae = {"architecture": architecture, "k_anneal_fraction": 0.8, "k_anneal_start": 8}
    job = make_job(sae=sae, train={"checkpoint_every": 10})
    whole = make_trainer(job)
    whole.run()
    resumed = make_trainer(job, resume_from=tmp_path / "checkpoints" / "step-00000010", output=tmp_path / "o2")
    resumed.run()
    expected, tensors = (dict(trainer.learners[""].state.tensors()) for trainer in (whole, resumed))
    assert float(expected["sae.threshold"]) > 0
    for name, tensor in expected.items():
        assert torch.equal(tensor, tensors[name]), name
