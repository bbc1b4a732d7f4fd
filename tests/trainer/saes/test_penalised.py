"""Tests for standard, gated and JumpReLU SAEs: losses, gradients, and the weight of the sparsity penalty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.saes import assert_same, batch, gradients, new_sae, peers_losses, peers_twin, random_sae
from support.steps import ALONE, skips, take_alone
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.activations.batches import Batch
from trainer.contract.planning import latent_capacity
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel, StepSums
from trainer.saes import base, penalised
from trainer.saes.gated import Gated
from trainer.saes.jumprelu import JumpReLU
from trainer.saes.kernels import buffer_sizer
from trainer.saes.penalised import Penalised, Penalty, Steering
from trainer.saes.sparse_acts import DenseActs, SparseActs
from trainer.saes.standard import Standard
from trainer.training.learner import Learner
from trainer.training.step import take_step

MakeJob = Callable[..., JobConfig]
PENALISED = {"k": 5, "sparsity_warmup_fraction": 0.0}
JUMP = {"bandwidth": 0.5}
KINDS: dict[str, Any] = {
    "standard": (Standard, {}),
    "gated": (Gated, {}),
    "jumprelu": (JumpReLU, JUMP),
    "jumprelu_tanh": (JumpReLU, JUMP | {"penalty": "tanh"}),
}
CAN_TRANSCODE = [kind for kind in KINDS if kind != "gated"]


def made(kind: str, *shape: int, is_sparse: bool = False, **settings: Any) -> Any:
    """Create a random SAE in which half of the latents fire, or only a few if `is_sparse` is true."""
    kind_class, own = KINDS[kind]
    sae = random_sae(kind_class, *shape, **(PENALISED | own | settings))
    # Give decoder rows different norms, because only some architectures keep their norms at 1.
    sae.W_dec.data *= torch.linspace(0.5, 2, sae.d_sae, dtype=torch.float64)[:, None]
    if kind.startswith("jumprelu"):
        sae.threshold.data.abs_()
    if is_sparse:
        sae.b_enc.data -= 4.0
    return sae


def loop_losses(sae: Any, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Compute the losses, activations and x_hat token by token and latent by latent, with plain autograd.

    Where the activation jumps, use the gradient of a function that is linear in a window around the jump.
    """
    centred = x if sae.is_transcoder else x - sae.b_dec
    rows, sparsity, gate_mse = [], [], []
    for token in range(len(x)):
        acts = []
        for latent in range(sae.d_sae):
            z = centred[token] @ sae.W_enc[:, latent] + sae.b_enc[latent]
            act, cost = of_one(sae, centred[token], z, latent)
            acts.append(act)
            sparsity.append(cost)
        rows.append(torch.stack(acts))
        if isinstance(sae, Gated):
            opened = (centred[token] @ sae.W_enc + sae.b_enc).relu()
            gate_mse.append((y[token] - opened @ sae.W_dec.detach() - sae.b_dec.detach()).square().sum())
    acts = torch.stack(rows)
    x_hat = acts @ sae.W_dec + sae.b_dec
    terms = {"mse": (y - x_hat).square().sum(), sae.traits.losses[1]: torch.stack(sparsity).sum()}
    if gate_mse:
        terms["gate_mse"] = torch.stack(gate_mse).sum()
    return terms, acts, x_hat


def of_one(sae: Any, centred: Tensor, z: Tensor, latent: int) -> tuple[Tensor, Tensor]:
    """Return a latent's activation and sparsity loss."""
    norm = sae.W_dec[latent].norm()
    if isinstance(sae, Standard):
        return z.relu(), z.relu() * norm
    if isinstance(sae, Gated):
        magnitude = centred @ (sae.W_enc[:, latent] * sae.r_mag[latent].exp()) + sae.b_mag[latent]
        return (magnitude.relu() if z > 0 else magnitude * 0), z.relu()
    threshold, width = sae.threshold[latent], sae.settings.bandwidth
    is_within = bool((z - threshold).abs() < width / 2)
    is_active = z.detach() > threshold.detach()
    # The value of `act` jumps at the threshold. `slope` provides the gradients for the threshold and, with a tanh
    # penalty, for z.
    distance = (z if sae._tanh_scale else z.detach()) - threshold
    slope = is_within * (distance - distance.detach()) / width
    act = z.relu() * is_active + threshold.detach() * slope
    return act, torch.tanh(sae._tanh_scale * act * norm) if sae._tanh_scale else is_active + slope


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(
    ("kind", "shape"), [(kind, (8, 24)) for kind in KINDS] + [(kind, (8, 24, 5)) for kind in CAN_TRANSCODE]
)
def test_every_loss_term_and_gradient_matches_a_naive_loop(kind: str, shape: tuple[int, ...], is_sparse: bool) -> None:
    sae, x = made(kind, *shape, is_sparse=is_sparse), batch(19, 8)
    y = batch(19, 5, seed=5) if sae.is_transcoder else x
    output, (naive, acts, x_hat) = sae(x, y), loop_losses(sae, x, y)
    assert isinstance(output.acts, SparseActs if is_sparse else DenseActs)
    assert int((acts > 0).sum()) > 0
    torch.testing.assert_close(output.acts.dense(), acts)
    torch.testing.assert_close(output.x_hat, x_hat)
    assert_same(output.losses, naive)
    for name, loss in naive.items():
        assert_same(gradients(sae, output.losses[name]), gradients(sae, loss))
    sae.penalty.unit.fill_(0.3)
    errors = naive["mse"] + naive.get("gate_mse", 0)
    torch.testing.assert_close(sae.objective(output.losses), (errors + 0.3 * naive[sae.traits.losses[1]]) / 3.0)


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_saelens_training_class_has_the_same_losses_and_gradients(kind: str, is_sparse: bool) -> None:
    # In SAELens, the gate's reconstruction loss also trains the decoder, contrary to the paper.
    # Therefore, only the encoder gradients of the gate's loss are compared.
    # SAELens multiplies the gate's penalty by decoder row norms, which are 1 in our gated SAE.
    pytest.importorskip("sae_lens")
    sae, x = made(kind, is_sparse=is_sparse), batch()
    if kind == "gated":
        sae.normalise_decoder()
    twin = saelens_twin(kind, sae)
    output, theirs = sae(x, x), peers_losses(twin, x)
    torch.testing.assert_close(output.acts.dense(), theirs["acts"])
    torch.testing.assert_close(output.x_hat, theirs["x_hat"])
    pairs = {
        "mse": theirs["mse_loss"],
        sae.traits.losses[1]: theirs["l0_loss" if kind.startswith("jumprelu") else "l1_loss"],
        **({"gate_mse": theirs["auxiliary_reconstruction_loss"]} if kind == "gated" else {}),
    }
    for name, loss in pairs.items():
        torch.testing.assert_close(output.losses[name], loss * len(x))
        ours, of_twin = gradients(sae, output.losses[name]), gradients(twin, loss * len(x))
        if kind == "gated":
            of_twin["b_enc"] = of_twin.pop("b_gate")
            compared = {"gate_mse": ("W_enc", "b_enc"), "gate_l1": ("W_enc", "b_enc", "b_dec")}.get(name, tuple(ours))
            ours, of_twin = ({key: losses[key] for key in compared} for losses in (ours, of_twin))
        assert_same(ours, of_twin)


def saelens_twin(kind: str, sae: Any) -> Any:
    from sae_lens.saes import gated_sae, jumprelu_sae, standard_sae

    if kind == "standard":
        names = (standard_sae.StandardTrainingSAE, standard_sae.StandardTrainingSAEConfig)
        return peers_twin(*names, sae, l1_coefficient=1.0)
    if kind == "gated":
        twin = gated_sae.GatedTrainingSAE(
            gated_sae.GatedTrainingSAEConfig(d_in=sae.d_in, d_sae=sae.d_sae, dtype="float64", device="cpu")
        )
        ours = {name: value.detach() for name, value in sae.named_parameters()}
        twin.load_state_dict({**ours, "b_gate": ours["b_enc"]} | {}, strict=False)
        return twin
    mode = "tanh" if kind == "jumprelu_tanh" else "step"
    settings = {"jumprelu_bandwidth": 0.5, "jumprelu_sparsity_loss_mode": mode}
    settings |= {"l0_coefficient": 1.0, "jumprelu_ste_to_input": kind == "jumprelu_tanh"}
    twin = peers_twin(jumprelu_sae.JumpReLUTrainingSAE, jumprelu_sae.JumpReLUTrainingSAEConfig, sae, **settings)
    # SAELens's threshold is in fp32, which is too imprecise for sums over hundreds of tokens.
    twin.threshold = torch.nn.Parameter(sae.threshold.detach().clone())
    return twin


# Tests for known pitfalls.


def test_latents_far_below_their_threshold_have_no_penalty() -> None:
    # With a sigmoid instead of a jump, dead latents would count towards L0, and L0's gradient would kill other latents.
    for kind in ("jumprelu", "jumprelu_tanh"):
        sae, x = made(kind), batch()
        sae.threshold.data[:] = 1e3
        output = sae(x, x)
        assert output.losses["sparsity"] == 0
        assert all(not gradient.any() for gradient in gradients(sae, output.losses["sparsity"]).values())


def test_the_gradient_of_l0_raises_thresholds_close_to_pre_activations() -> None:
    sae, x = made("jumprelu"), batch()
    grads = gradients(sae, sae(x, x).losses["sparsity"])["threshold"]
    assert (grads <= 0).all()
    assert (grads < 0).any()


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_a_small_threshold_moves_as_far_as_a_large_one(size: float) -> None:
    # If Adam updated the threshold's logarithm, a threshold of 1e-3 would barely move.
    sae, x = made("jumprelu", bandwidth=4.0).float(), batch().float()
    sae.threshold.data[:] = size
    optimizer = torch.optim.Adam(sae.parameters(), lr=0.01)
    sae(x, x).losses["sparsity"].backward()
    optimizer.step()
    moved = (sae.threshold - size).detach()
    torch.testing.assert_close(moved[moved != 0], torch.full_like(moved[moved != 0], 0.01), rtol=1e-3, atol=0)


def test_under_bf16_autocast_the_threshold_and_its_gradient_stay_in_fp32() -> None:
    # In bf16, a step of 1e-3 on a threshold of 1 would be rounded away.
    sae, x = made("jumprelu", bandwidth=4.0).float(), batch().float()
    sae.threshold.data[:] = 1.0
    with torch.autocast("cpu", torch.bfloat16):
        losses = sae(x, x).losses
    gradient = gradients(sae, losses["sparsity"])["threshold"]
    assert sae.threshold.dtype == gradient.dtype == torch.float32
    exact = gradients(sae, sae(x, x).losses["sparsity"])["threshold"]
    torch.testing.assert_close(gradient, exact, rtol=0.1, atol=2)
    sae.threshold.data -= 1e-3 * gradient.sign()
    assert (sae.threshold[gradient != 0] != 1.0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_in_the_input_reaches_the_loss(kind: str) -> None:
    sae, x = made(kind, is_sparse=True), batch()
    bad = x.clone()
    bad[3, 2] = torch.nan
    assert sae(bad, x).losses["mse"].isnan()


def test_negative_thresholds_are_clamped_to_0() -> None:
    # A negative threshold would still have a gradient, although the activation does not jump there.
    sae = made("jumprelu")
    sae.threshold.data[:3] = -0.5
    thresholds = sae.threshold.detach().clone()[3:]
    sae.constrain()
    assert not sae.threshold[:3].any()
    assert torch.equal(sae.threshold[3:], thresholds)


@pytest.mark.parametrize("kind", KINDS)
def test_activations_in_evaluation_match_those_in_training(kind: str) -> None:
    sae, x = made(kind, is_sparse=True), batch()
    trained = sae(x, x)
    sae.eval()
    torch.testing.assert_close(sae(x, x).acts.dense(), trained.acts.dense())


# Tests on the GPU code path, where the host does not know how many values are above the bound.


@pytest.fixture
def foreseeing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Penalised], None]:
    """Return a function that makes an SAE presize its buffers as on a GPU, and use sparse matmuls at any density."""
    monkeypatch.setattr(latent_capacity, "DENSE", 1)

    def go(sae: Penalised) -> None:
        monkeypatch.setattr(base, "above", sae._buffer_sizer.above)

    return go


@pytest.mark.parametrize(
    ("kind", "shape"), [(kind, (8, 24)) for kind in KINDS] + [(kind, (8, 24, 5)) for kind in CAN_TRANSCODE]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_losses_and_gradients_with_presized_buffers_match_dense_matmuls(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, foreseeing: Callable[[Penalised], None]
) -> None:
    sae, x = made(kind, *shape, is_sparse=True).to(dtype), batch(19, 8).to(dtype)
    y = batch(19, 5, seed=5).to(dtype) if sae.is_transcoder else x
    foreseeing(sae)
    outputs = []
    for _ in range(buffer_sizer.MEMORY + 1):
        outputs.append(sae(x, y))
        sae.count_step(len(x))
    dense, sparse = outputs[-2:]
    assert isinstance(dense.acts, DenseActs)
    assert isinstance(sparse.acts, SparseActs)
    assert (sparse.acts.values > 0).any()
    torch.testing.assert_close(sparse.acts.dense(), dense.acts.dense())
    torch.testing.assert_close(sparse.x_hat, dense.x_hat)
    assert_same(sparse.losses, dense.losses)
    for name, loss in dense.losses.items():
        # A gradient that should be 0 may be a sum whose terms do not cancel exactly.
        tolerance = {"rtol": 1e-7, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
        assert_same(gradients(sae, sparse.losses[name]), gradients(sae, loss), **tolerance)
    assert not sae.has_overflowed()


def learner(make_job: MakeJob, kind: str, **train: Any) -> Learner:
    job = make_job(sae={"architecture": kind, "d_sae": 64, "k": 4}, train={"n_steps": 60, **train})
    one = Learner(job, 16, None, Parallel(torch.device("cpu")))
    one.initialise(rows(99, 500), rows(99, 500))
    return one


def rows(seed: int, n_tokens: int = 128) -> Tensor:
    return batch(n_tokens, 16, seed).float()


def take_cut(one: Learner, number: int, x: Tensor, n_passes: int) -> None:
    """Take step `number` with its tokens split across `n_passes` passes."""
    take_step([one], ALONE, number, [Batch([(part, part)], len(part)) for part in x.tensor_split(n_passes)])


@pytest.mark.parametrize("n_passes", [1, 3])
@pytest.mark.parametrize("kind", ["standard", "gated", "jumprelu"])
def test_a_run_learns_the_same_with_and_without_presized_buffers(
    kind: str,
    n_passes: int,
    make_job: MakeJob,
    foreseeing: Callable[[Penalised], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, ahead = (learner(make_job, kind, accumulate=n_passes) for _ in range(2))
    for step in range(20):
        take_cut(plain, step, rows(step), n_passes)
    monkeypatch.setattr(latent_capacity, "MARGIN", 3)
    foreseeing(ahead.sae)
    for step in range(20):
        take_cut(ahead, step, rows(step), n_passes)
    assert skips(ahead) == (0, 0, 0)
    assert_same(dict(ahead.sae.named_parameters()), dict(plain.sae.named_parameters()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("n_passes", [1, 2])
@pytest.mark.parametrize("kind", ["standard", "gated", "jumprelu"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_overflows_its_buffer_is_skipped_and_the_next_step_succeeds(
    kind: str, precision: str, n_passes: int, make_job: MakeJob, foreseeing: Callable[[Penalised], None]
) -> None:
    one = learner(make_job, kind, precision=precision, accumulate=n_passes)
    # With a loss scale of 1, no gradient overflows in 16 bits.
    one.loss_scale.factor.fill_(1.0)
    foreseeing(one.sae)
    for step in range(buffer_sizer.MEMORY):
        take_cut(one, step, rows(step), n_passes)
    before = {name: tensor.clone() for name, tensor in one.state.tensors() if "clean_steps" not in name}
    # Rows that are ten times as large activate more latents than the buffer can hold.
    many = rows(9)
    many[-64:] *= 10
    take_cut(one, 9, many, n_passes)
    after = dict(one.state.tensors())
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert skips(one) == (1, 0, 1)
    take_cut(one, 10, many, n_passes)
    assert not torch.equal(before["sae.W_enc"], one.sae.W_enc)
    assert skips(one) == (0, 0, 0)


def test_all_ranks_skip_a_step_that_overflows_the_buffer_on_one_rank(
    make_job: MakeJob, foreseeing: Callable[[Penalised], None]
) -> None:
    ranks = [learner(make_job, "standard") for _ in range(2)]
    for step in range(buffer_sizer.MEMORY + 1):
        for rank, one in enumerate(ranks):
            foreseeing(one.sae)
            one.begin_step(step)
            x = rows(2 * step + rank) * (10 if step == buffer_sizer.MEMORY and rank else 1)
            one.accumulate(x, x)
        # Simulate the exchange of sums between the ranks.
        for mine, others in zip(*(of_all(one.tensors_to_exchange()) for one in ranks), strict=True):
            mine.add_(others)
            others.copy_(mine)
        for one in ranks:
            one.update()
    assert [skips(one) for one in ranks] == [(1, 0, 1)] * 2
    assert_same(*(dict(one.sae.named_parameters()) for one in ranks), rtol=0, atol=0)


def of_all(sums: StepSums) -> list[Tensor]:
    return [*sums.of_latents, *sums.sharded, *sums.of_all]


def test_a_nan_is_not_mistaken_for_a_buffer_overflow(
    make_job: MakeJob, foreseeing: Callable[[Penalised], None]
) -> None:
    one = learner(make_job, "jumprelu")
    foreseeing(one.sae)
    for step in range(buffer_sizer.MEMORY):
        take_alone(one, step, rows(step))
    bad = rows(9)
    bad[:100] = torch.nan
    take_alone(one, 9, bad)
    assert skips(one) == (1, 1, 0)


# Tests for the penalty's weight.


@pytest.mark.parametrize("kind", KINDS)
def test_k_latents_per_token_are_active_at_the_start(kind: str) -> None:
    torch.manual_seed(3)
    kind_class, own = KINDS[kind]
    sae: Penalised = new_sae(kind_class, 12, 400, **(PENALISED | own))
    torch.nn.init.normal_(sae.W_enc)
    x = torch.randn(3000, 12)
    sae.calibrate(x)
    sae(x, x)
    assert float(sae.step_sums[: sae.d_sae].sum()) / 3000 == pytest.approx(5, rel=0.05)


def penalty(coefficient: float | str = "auto", warmup: float = 0.0, lowest: float = 0.0) -> Penalty:
    made = Penalty(10, coefficient, warmup, Steering(start=0.5, gain=2, integral_gain=0.1, lowest=lowest, most=10))
    made.start(torch.tensor(4.0))
    return made


def steer(penalty: Penalty, l0: float) -> float:
    penalty.steer(torch.tensor(100 * l0), torch.tensor(100.0))
    return float(penalty.weight)


def test_the_penalty_weight_reacts_immediately_and_more_the_longer_l0_is_off_target() -> None:
    e = float(torch.e)
    steered = penalty()
    assert float(steered.weight) == 2
    assert steer(steered, 10) == pytest.approx(2)
    # The expected weight is 0.5 · 4 · (1 + gain · 1 + integral).
    assert steer(steered, 10 * e) == pytest.approx(2 * (1 + 2 + 0.1))
    assert steer(steered, 10 * e) == pytest.approx(2 * (1 + 2 + 0.2))
    assert steer(steered, 10) == pytest.approx(2 * (1 + 0.2))


def test_the_penalty_weight_has_a_minimum_and_rises_from_it_quickly() -> None:
    for lowest in (0.0, -3.0):
        steered = penalty(lowest=lowest)
        for _ in range(1000):
            l0 = steer(steered, 1)
        assert l0 == pytest.approx(2 * lowest)
        assert steer(steered, 40) > 2 * lowest


def test_one_batch_can_change_the_penalty_weight_only_by_a_bounded_amount() -> None:
    assert steer(penalty(), 0) == 0
    assert steer(penalty(), 1e6) == pytest.approx(2 * (1 + 2.1 * float(torch.tensor(10.0).log())))


def test_a_skipped_step_leaves_the_penalty_weight_unchanged() -> None:
    steered = penalty()
    before = steer(steered, 20)
    steered.steer(torch.tensor(0.0), torch.tensor(0.0))
    assert float(steered.weight) == before
    assert float(steered.integral) == pytest.approx(0.1 * float(torch.tensor(2.0).log()))


def test_a_fixed_coefficient_is_warmed_up_but_not_adjusted() -> None:
    fixed = penalty(coefficient=3.0, warmup=0.2)
    assert steer(fixed, 1000) == 3
    weights = []
    for progress in (0.5, 0.0, 0.1, 0.2):
        fixed.begin_step(progress)
        weights.append(float(fixed.weight))
    assert weights == pytest.approx([3, 0, 1.5, 3])


def test_the_penalty_weight_depends_on_the_sums_over_micro_batches_and_ranks() -> None:
    parts = [batch(10, seed=3), batch(30, seed=4)]
    first, second, whole = made("standard"), made("standard"), made("standard")
    first(parts[0], parts[0])
    second(parts[1], parts[1])
    first.step_sums.add_(second.step_sums)
    whole(torch.cat(parts), torch.cat(parts))
    for sae in (first, whole):
        sae.end_step(sae.n_tokens_in_step())
    torch.testing.assert_close(first.penalty.deviation, whole.penalty.deviation)
    assert first.penalty.deviation != 0


class Largest(TorchDispatchMode):
    """A dispatch mode that records the size of the largest tensor returned by any operation."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            self.most = max(self.most, one.numel()) if isinstance(one, Tensor) else self.most
        return made


@pytest.mark.parametrize("kind", KINDS)
def test_the_initial_threshold_is_found_without_storing_all_pre_activations(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penalised, "START_VALUES", 2**12)
    sae, x = made(kind, 8, 96), batch(2500, 8)
    expected = (x[:2048] - sae.input_bias) @ sae.W_enc + sae.b_enc
    bound = expected.flatten().sort(descending=True).values[5 * 2048 - 1]
    found: list[Tensor] = []
    monkeypatch.setattr(sae, "_raise_bar", found.append)
    with Largest() as largest:
        sae.calibrate(x)
    torch.testing.assert_close(found[0], bound)
    assert largest.most <= 2 * 8 * 2048
