from __future__ import annotations

import pytest
import torch
from support.saes import batch, random_sae
from torch import Tensor

from trainer.saes.base import Output
from trainer.saes.batch_topk import BatchTopK
from trainer.saes.topk import TopK


def random_topk(d_out: int | None = None) -> BatchTopK | TopK:
    settings = {"k": 5, "k_aux": 4, "auxk_alpha": 1 / 32}
    if d_out:
        return random_sae(BatchTopK, 12, 40, d_out, threshold_rate=0.2, **settings)
    return random_sae(TopK, **settings)


def fired_in(output: Output) -> Tensor:
    return output.acts.dense().gt(0).any(dim=0)


def test_the_tokens_since_a_latent_fired_are_counted_until_it_is_dead() -> None:
    sae, x = random_topk(), batch(80)
    sae.b_enc.data[5] = -1e6
    fired = fired_in(sae(x, x))
    assert fired.any()
    assert not fired[5]
    sae.end_step(sae.n_tokens_in_step())
    assert sae.n_tokens_since_fired.tolist() == torch.where(fired, 0, 80).tolist()
    assert not sae.dead().any()
    assert not sae.may_have_dead()
    sae(x, x)
    sae.end_step(sae.n_tokens_in_step())
    assert torch.equal(sae.dead(), ~fired)
    assert sae.may_have_dead()


def test_the_host_corrects_its_bound_on_tokens_since_fired_after_later_steps() -> None:
    sae, x = random_topk(), batch(80)
    for _ in range(3):
        sae(x, x)
        sae.end_step(sae.n_tokens_in_step())
        sae.count_step(80)
    sae.n_tokens_since_fired.clamp_max_(90)
    slack = sae.since_fired_slack()
    assert slack.tolist() == [3 * 80 - int(sae.n_tokens_since_fired.max())]
    sae.end_step(sae.n_tokens_in_step())
    sae.count_step(80)
    sae.take_since_fired_slack(float(slack))
    assert sae._longest_since_fired == int(sae.n_tokens_since_fired.max()) + 80


def test_a_latent_that_fires_in_any_micro_batch_or_on_any_rank_is_alive() -> None:
    first, second = random_topk(), random_topk()
    x = batch(60)
    fired = fired_in(first(x[:20], x[:20])) | fired_in(first(x[20:30], x[20:30])) | fired_in(second(x[30:], x[30:]))
    # Simulate the exchange of sums between two ranks.
    first.step_sums.add_(second.step_sums)
    assert float(first.n_tokens_in_step()) == 60
    first.end_step(first.n_tokens_in_step())
    assert torch.equal(first.n_tokens_since_fired == 0, fired)
    assert first.step_sums.abs().sum() == 0


def test_a_steps_sums_are_firing_counts_the_token_count_and_the_squared_error() -> None:
    sae, x = random_topk(), batch(50)
    output = sae(x, x)
    torch.testing.assert_close(sae.step_sums[:40], (output.acts.dense() > 0).sum(dim=0).double())
    assert sae.step_sums[40:].tolist() == pytest.approx([50.0, output.losses["mse"].item()])


def test_nothing_is_counted_outside_training() -> None:
    for sae in (random_topk(), random_topk(d_out=7)):
        sae.eval()
        sae(batch(), torch.zeros(33, sae.d_out, dtype=torch.float64))
        assert sae.step_sums.abs().sum() == 0


def test_a_step_without_tokens_leaves_the_state_unchanged() -> None:
    sae, x = random_topk(d_out=7), batch()
    sae(x, batch(33, 7))
    sae.end_step(sae.n_tokens_in_step())
    before = {name: value.clone() for name, value in sae.state_dict().items()}
    sae(x, batch(33, 7))
    sae.step_sums.zero_()
    sae.end_step(sae.n_tokens_in_step())
    for name, value in sae.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_loaded_sae_knows_which_latents_are_dead() -> None:
    old, new = random_topk(), random_topk()
    old.n_tokens_since_fired[3] = 1000
    new.load_state_dict(old.state_dict())
    assert new.dead().nonzero().flatten().tolist() == [3]
    assert new.may_have_dead()


def test_the_gradient_component_along_decoder_rows_is_removed() -> None:
    sae, x = random_topk(), batch()
    sae.objective(sae(x, x).losses).backward()
    assert sae.W_dec.grad is not None
    before = sae.W_dec.grad.clone()
    sae.project_gradient()
    assert (before * sae.W_dec).sum(dim=1).abs().max() > 1e-3
    torch.testing.assert_close((sae.W_dec.grad * sae.W_dec).sum(dim=1), torch.zeros(sae.d_sae, dtype=torch.float64))
    across = before - (before * sae.W_dec).sum(dim=1, keepdim=True) * sae.W_dec
    torch.testing.assert_close(sae.W_dec.grad, across)


def test_decoder_rows_are_normalised_to_unit_norm() -> None:
    sae = random_topk()
    sae.W_dec.data *= 7
    sae.normalise_decoder()
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(40, dtype=torch.float64))


def test_an_sae_subtracts_b_dec_from_its_input_and_a_transcoder_subtracts_the_mean() -> None:
    sae, transcoder = random_topk(), random_topk(d_out=7)
    assert sae.input_bias is sae.b_dec
    assert transcoder.input_bias is transcoder.x_mean
    assert (transcoder.W_enc.shape, transcoder.W_dec.shape, transcoder.b_dec.shape) == ((12, 40), (40, 7), (7,))


@pytest.mark.parametrize("d_out", [None, 7])
def test_exported_weights_on_raw_data_match_the_sae_on_normalised_data(d_out: int | None) -> None:
    sae = random_topk(d_out).eval()
    sae.x_scale.fill_(0.25)
    sae.y_scale.fill_(0.25 if d_out is None else 3.0)
    sae.x_mean.copy_(batch(1)[0])
    raw = 4 * batch()
    x_hat = sae(raw * sae.x_scale, torch.zeros(33, sae.d_out, dtype=torch.float64)).x_hat / sae.y_scale
    weights = sae.export_weights()
    pre_acts = (raw if d_out else raw - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
    cut = weights.get("threshold", pre_acts.topk(5, dim=1).values[:, -1:] - 1e-9)
    torch.testing.assert_close(pre_acts.relu() * (pre_acts > cut) @ weights["W_dec"] + weights["b_dec"], x_hat)
