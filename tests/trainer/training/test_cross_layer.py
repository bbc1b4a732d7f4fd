"""Tests cross-layer transcoders: training, ranks, rows and settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.combinations import slow_except
from support.layered_rows import LAYERS, N_ROWS, D, write_layers
from torch import Tensor

from trainer.activations.open_source import open_source
from trainer.contract.errors import JobFileError
from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members, parse_job
from trainer.contract.store.metrics_store import SeriesReader, best_sae, value_of_sae
from trainer.parallel.base import Parallel
from trainer.training.layers import Layers
from trainer.training.learner import Learner, StepState, layer_in

ALONE = Parallel(torch.device("cpu"))
BATCH = 240
LABELS = [f"layer={layer}" for layer in LAYERS]
SAE = {"cross_layer": True, "architecture": "batch_topk", "d_sae": 48, "k": 3, "dead_after_tokens": 960}


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, str]:
    write_layers(tmp_path / "rows")
    return {"path": str(tmp_path / "rows"), "hook": "mlp.2-4"}


def learners_of(n_layers: int, d: int, d_sae: int, k: int, architecture: str, **settings: Any) -> list[Learner]:
    hooks = [f"mlp.{layer}" for layer in range(n_layers)]
    sae = {"cross_layer": True, "architecture": architecture, "d_sae": d_sae, "k": k, **settings}
    table = {"data": {"path": "x", "hook": hooks}, "sae": sae, "train": {"batch_size": 64, "n_steps": 10}}
    job, problems = parse_job(table)
    assert job is not None, problems
    return [Learner(one, d, d, ALONE, 0, layer_in(job, one)) for one in members(job).values()]


def randomise(learners: list[Learner], generator: torch.Generator) -> None:
    for learner in learners:
        for parameter in learner.sae.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).abs().mul(0.3)
        for buffer in (learner.sae.x_mean, learner.sae.x_scale, learner.sae.y_scale, learner.sae.y_variance):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def dense_loss(
    learners: list[Learner], masks: list[Tensor], x: Tensor, y: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """Return Σ_j ‖y_j − ŷ_j‖² / variance_j by the definition, in float64, with the latents that `masks` mark."""
    n, weights = (
        len(learners),
        [
            {name: one.detach().double().requires_grad_() for name, one in learner.sae.named_parameters()}
            for learner in learners
        ],
    )
    xs, ys = x.double().tensor_split(n, dim=1), y.double().tensor_split(n, dim=1)
    acts = []
    for learner, own, mask, rows in zip(learners, weights, masks, xs, strict=True):
        centred = rows * learner.sae.x_scale.double() - learner.sae.x_mean.double()
        acts.append(((centred @ own["W_enc"] + own["b_enc"]) * mask).relu())
    loss, d = torch.zeros((), dtype=torch.float64), ys[0].shape[1]
    for target, learner in enumerate(learners):
        x_hat = weights[target]["b_dec"]
        for source in range(target + 1):
            first = (target - source) * d
            x_hat = x_hat + acts[source] @ weights[source]["W_dec"][:, first : first + d]
        error = x_hat - ys[target] * learner.sae.y_scale.double()
        loss = loss + error.square().sum() / learner.sae.y_variance.double()
    flat = torch.autograd.grad(loss, [one for own in weights for one in own.values()], allow_unused=True)
    return loss, list(flat)


def names_of(learners: list[Learner]) -> list[str]:
    return [name for learner in learners for name, _ in learner.sae.named_parameters()]


@given(
    n_layers=st.integers(2, 4),
    d=st.integers(2, 7),
    d_sae=st.integers(4, 20),
    n_tokens=st.integers(1, 12),
    seed=st.integers(0, 2**16),
    architecture=st.sampled_from(["topk", "batch_topk", "share_k", "jumprelu"]),
)
def test_outputs_and_gradients_equal_those_of_a_dense_loop(
    n_layers: int, d: int, d_sae: int, n_tokens: int, seed: int, architecture: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shares = {"share_k": True} if architecture == "share_k" else {}
    learners = learners_of(n_layers, d, d_sae, min(3, d_sae), "batch_topk" if shares else architecture, **shares)
    randomise(learners, generator)
    x, y = (torch.randn(n_tokens, n_layers * d, generator=generator) for _ in range(2))
    for learner in learners:
        learner.begin_step(5)
    found = [(one.learner, one.output) for one in Layers(learners).outputs(x, y)]
    masks = [output.acts.dense().detach() > 0 for _, output in found]
    loss, gradients = dense_loss(learners, masks, x, y)
    total = sum(output.losses["mse"] / learner.sae.y_variance for learner, output in found)
    torch.testing.assert_close(total.double(), loss, rtol=2e-4, atol=1e-5)
    total.backward()
    if architecture == "jumprelu":
        # The jump has gradients of its own, but not for the decoder.
        wanted = [gradients[at] for at, name in enumerate(names_of(learners)) if name in ("W_dec", "b_dec")]
        own = [
            one.grad
            for learner in learners
            for name, one in learner.sae.named_parameters()
            if name in ("W_dec", "b_dec")
        ]
        for gradient, expected in zip(own, wanted, strict=True):
            torch.testing.assert_close(gradient.double(), expected, rtol=2e-3, atol=2e-4)
    else:
        own = [parameter.grad for learner in learners for parameter in learner.sae.parameters()]
        for gradient, wanted in zip(own, gradients, strict=True):
            assert gradient is not None
            torch.testing.assert_close(gradient.double(), wanted, rtol=2e-3, atol=2e-4)


def test_layers_that_share_k_keep_the_largest_activations_of_all_layers() -> None:
    learners = learners_of(3, 5, 20, 4, "batch_topk", share_k=True)
    generator = torch.Generator().manual_seed(0)
    randomise(learners, generator)
    # The last layer has the largest activations.
    learners[2].sae.x_scale.mul_(3)
    x, y = (torch.randn(8, 15, generator=generator) for _ in range(2))
    pre_acts = []
    for learner, rows in zip(learners, x.tensor_split(3, dim=1), strict=True):
        sae = learner.sae
        pre_acts.append((rows * sae.x_scale - sae.x_mean) @ sae.W_enc + sae.b_enc)
    bound = torch.stack(pre_acts).flatten().topk(3 * 4 * 8).values[-1]
    outputs = list(Layers(learners).outputs(x, y))
    l0s = []
    for one, wanted in zip(outputs, pre_acts, strict=True):
        found = one.output.acts.dense()
        torch.testing.assert_close(found, (wanted * (wanted >= bound)).relu(), rtol=1e-4, atol=1e-5)
        l0s.append(int((found > 0).sum()))
    assert l0s[2] > l0s[0]


def test_a_layer_without_active_latents_keeps_its_threshold() -> None:
    learners = learners_of(2, 4, 8, 2, "batch_topk", share_k=True)
    randomise(learners, torch.Generator().manual_seed(0))
    # All of the largest activations are in the second layer.
    learners[1].sae.x_scale.mul_(1000)
    layers, sae = Layers(learners), learners[0].sae
    sae.threshold.fill_(0.5)
    layers.accumulate(1 + torch.rand(6, 8), torch.randn(6, 8))
    assert sae.fired is not None
    assert sae.fired.sum() == 0
    layers.update()
    assert float(sae.threshold) == 0.5


def test_the_held_out_l0_of_layers_that_share_k_is_k_on_average(
    make_job: Callable[..., JobConfig], make_trainer: Callable[..., Any], rows: dict[str, str]
) -> None:
    trainer = make_trainer(make_job(data=rows, sae=SAE | {"share_k": True}, train={"n_steps": 30, "batch_size": BATCH}))
    trainer.run()
    saes = [learner.sae for learner in trainer.learners.values()]
    assert len({tuple(sae.set_thresholds.tolist()) for sae in saes}) == 1
    l0s = [trainer.report.values[label]["heldout_l0"] for label in trainer.learners]
    assert sum(l0s) / len(l0s) == pytest.approx(3, rel=0.1)
    assert max(l0s) > 1.1 * min(l0s)


def test_a_latent_writes_to_its_own_layer_and_to_all_later_layers() -> None:
    learners = learners_of(3, 4, 8, 2, "batch_topk")
    assert [tuple(learner.sae.W_dec.shape) for learner in learners] == [(8, 12), (8, 8), (8, 4)]
    assert [tuple(learner.sae.W_enc.shape) for learner in learners] == [(4, 8)] * 3


def test_a_pass_leaves_no_reconstructions_behind() -> None:
    learners = learners_of(2, 4, 8, 2, "batch_topk")
    Layers(learners).accumulate(torch.randn(6, 8), torch.randn(6, 8))
    assert all(one.sae.written_before is None and one.sae.written_later is None for one in learners)


def weights_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "sae_weights.safetensors")


def alike(folder: Path, expected: Path) -> None:
    for label in LABELS:
        wanted = weights_in(expected / label)
        for name, tensor in weights_in(folder / label).items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-3, msg=f"{label} {name}")


MODES = {
    "ddp-2": (2, "ddp", 2),
    "ddp-2-share_k": (2, "ddp", 2),
    "tensor-2-share_k": (2, "tensor", 1),
    "tensor-2": (2, "tensor", 1),
    "tensor-4": (4, "tensor", 1),
    "hybrid-4": (4, "hybrid", 2),
    "hybrid-4-share_k": (4, "hybrid", 2),
}


@pytest.mark.parametrize("mode", slow_except(["ddp-2", "hybrid-4-share_k"], MODES))
def test_several_ranks_train_the_same_as_one_and_resume_from_its_checkpoint(
    mode: str, make_job: Callable[..., JobConfig], make_trainer: Callable[..., Any], start_ranks: Callable[..., Any],
    rows: dict[str, str], tmp_path: Path,
) -> None:  # fmt: skip
    n_ranks, name, n_data = MODES[mode]
    sae = SAE | {"share_k": mode.endswith("share_k")}
    train = {"checkpoint_every": 10, "n_steps": 20}
    make_trainer(make_job(data=rows, sae=sae, train=train | {"batch_size": BATCH})).run()
    job = make_job(data=rows, sae=sae, train=train | {"batch_size": BATCH // n_data}, parallel={"mode": name})
    ranks = start_ranks(job, n_ranks)
    assert ranks.wait() == [EXIT_FINISHED] * n_ranks
    alike(ranks.spec.run_dir / "sae", tmp_path / "sae")
    start = tmp_path / "checkpoints" / "step-00000010"
    resumed = start_ranks(job, n_ranks, run_dir=tmp_path / "resumed", resume_from=start)
    assert resumed.wait() == [EXIT_FINISHED] * n_ranks
    alike(resumed.spec.run_dir / "sae", tmp_path / "sae")


def test_a_resumed_run_gives_the_same_bits(
    make_job: Callable[..., JobConfig], make_trainer: Callable[..., Any], rows: dict[str, str], tmp_path: Path
) -> None:
    job = make_job(data=rows, sae=SAE, train={"checkpoint_every": 10, "n_steps": 20})
    make_trainer(job).run()
    start = tmp_path / "checkpoints" / "step-00000010"
    make_trainer(job, resume_from=start, checkpoints=tmp_path / "c2", output=tmp_path / "again").run()
    for label in LABELS:
        found, wanted = (weights_in(tmp_path / folder / label) for folder in ("again", "sae"))
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_features_of_earlier_layers_lower_the_fvu_of_later_ones(
    make_job: Callable[..., JobConfig],
    make_trainer: Callable[..., Any],
    kept: Any,
    rows: dict[str, str],
    tmp_path: Path,
) -> None:
    train = {"n_steps": 150, "batch_size": 512, "lr": 0.01}
    fvus = {}
    for is_cross_layer in (True, False):
        sae = SAE | {"cross_layer": is_cross_layer, "d_sae": 96, "k": 4}
        trainer = make_trainer(make_job(data=rows, sae=sae, train=train), output=tmp_path / str(is_cross_layer))
        trainer.run()
        fvus[is_cross_layer] = [trainer.report.values[label]["heldout_fvu"] for label in trainer.learners]
    # The first layer has no earlier layer. The later targets are sums that their own inputs do not determine.
    assert fvus[True][1] < 0.8 * fvus[False][1]
    assert fvus[True][2] < 0.8 * fvus[False][2]


def test_a_token_that_is_an_outlier_at_one_layer_is_left_out_at_all_layers(tmp_path: Path) -> None:
    write_layers(tmp_path / "rows", outlier=7)
    table = {"data": {"path": str(tmp_path / "rows"), "hook": "mlp.2-4"}, "sae": SAE}
    job, problems = parse_job(table)
    assert job is not None, problems
    source = open_source(job)
    assert (source.n_hooks, source.d_in, source.d_out, source.n_tokens) == (1, 3 * D, 3 * D, N_ROWS)
    from trainer.activations.outliers import Outliers

    x, y = source.pairs(torch.arange(N_ROWS).numpy())  # type: ignore[attr-defined]
    outliers = Outliers(x, y, 10.0, parts=job.part_widths)
    assert torch.nonzero(~outliers.ordinary(x, y)).flatten().tolist() == [7]
    assert torch.nonzero(~outliers.of_part(2).ordinary(x[:, 2 * D :], x[:, 2 * D :])).flatten().tolist() == [7]
    assert outliers.of_part(0).ordinary(x[:, :D], x[:, :D]).all()


def test_layers_with_rows_of_other_tokens_are_refused(rows: dict[str, str]) -> None:
    file = Path(rows["path"]) / "mlp_in.3" / "shard-00000.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"token_ids": tensors["token_ids"].flip(0).contiguous()}, file)
    job, _ = parse_job({"data": rows, "sae": SAE})
    assert job is not None
    with pytest.raises(JobFileError, match="belong to different tokens"):
        open_source(job)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data": {"hook": "mlp.2"}}, "sae.cross_layer: needs the MLPs of at least two layers"),
        ({"data": {"hook": "resid_post.2-4"}}, "sae.cross_layer: needs the MLPs of at least two layers"),
        (
            {"data": {"hook": "mlp.4, mlp.2"}},
            "data.hook: must name the layers of a cross-layer transcoder in ascending",
        ),
        ({"sae": {"k": [2, 4]}}, "sae.k: has several values, but a job trains one cross-layer transcoder"),
        ({"train": {"seed": [0, 1]}}, "train.seed: has several values"),
        ({"sae": {"cross_layer": [True, False]}}, "sae.cross_layer: cannot have several values"),
        ({"sae": {"architecture": "gated"}}, "sae.architecture: cannot train a cross-layer transcoder; use"),
        ({"sae": {"cross_layer": False, "share_k": True}}, "sae.share_k: only the layers of a cross-layer transcoder"),
        ({"sae": {"skip": True}}, "sae.skip: is not supported with sae.cross_layer; leave it out"),
        ({"sae": {"resample_every_tokens": 100}}, "sae.resample_every_tokens: is not supported"),
        ({"data": {"scale_dimensions": "auto"}}, "data.scale_dimensions: is not supported"),
        ({"train": {"precision": "fp16"}}, "train.precision: sae.cross_layer needs"),
        ({"train": {"halving": True}}, "train.halving: is not supported"),
        ({"parallel": {"mode": "sweep"}}, "parallel.mode: sae.cross_layer needs"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    table: dict[str, Any] = {"data": {"path": "x", "hook": "mlp.2-4"}, "sae": SAE}
    for section, values in changes.items():
        table[section] = table.get(section, {}) | values
    job, problems = parse_job(table)
    assert job is None
    assert any(str(one).startswith(problem) for one in problems), problems


def test_the_figures_of_the_run_are_means_over_its_layers(
    make_job: Callable[..., JobConfig], start_ranks: Callable[..., Any], rows: dict[str, str]
) -> None:
    ranks = start_ranks(make_job(data=rows, sae=SAE), 1)
    assert ranks.wait() == [EXIT_FINISHED]
    with contextlib.closing(SeriesReader(ranks.spec.run_dir / "metrics.db")) as reader:
        latest = reader.latest()
    fvus = [latest[f"heldout_fvu@{label}"] for label in LABELS]
    assert best_sae(latest) == ""
    assert value_of_sae(latest, "heldout_fvu", "") == pytest.approx(sum(fvus) / len(fvus))
    # The curve of the run is drawn from these values.
    assert latest["heldout_fvu"] == pytest.approx(sum(fvus) / len(fvus))


def test_a_layer_that_loses_activations_makes_all_layers_skip_the_step_without_counting_a_bad_gradient() -> None:
    learners = learners_of(3, 4, 8, 2, "jumprelu")
    randomise(learners, torch.Generator().manual_seed(0))
    before = [learner.sae.W_dec.detach().clone() for learner in learners]
    layers = Layers(learners)
    layers.accumulate(torch.randn(6, 12), torch.randn(6, 12))
    # A GPU sets the gradients to NaN if its buffer was too small, and counts the loss in the step's sums.
    learners[1].sae.step_sums[learners[1].sae.n_own + 2] = 1
    for parameter in learners[1].sae.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad * torch.nan
    layers.update()
    for learner, weights in zip(learners, before, strict=True):
        assert torch.equal(learner.sae.W_dec, weights)
        state = StepState.of(learner.take_state())
        assert (state.skipped, state.skipped_in_a_row, state.overflowed) == (1, 0, 1)


def test_all_layers_are_clipped_by_one_norm() -> None:
    x, y = (torch.randn(6, 12, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    norms = []
    for is_together in (True, False):
        learners = learners_of(3, 4, 8, 2, "batch_topk")
        randomise(learners, torch.Generator().manual_seed(0))
        Layers(learners).accumulate(x, y)
        for unit in [Layers(learners)] if is_together else learners:
            unit.update()
        norms.append(torch.stack([learner.grad_norm for learner in learners]))
    together, alone = norms
    torch.testing.assert_close(together, alone.norm().expand(3), rtol=1e-4, atol=0)


def test_auxk_revives_latents_for_their_own_target() -> None:
    learners = learners_of(2, 4, 8, 2, "batch_topk")
    randomise(learners, torch.Generator().manual_seed(0))
    # With these inputs, all pre-activations are positive.
    sae, x, y = learners[0].sae, 5 + torch.rand(6, 8), torch.randn(6, 8)
    Layers(learners).accumulate(x, y)
    assert sae.fired is not None
    silent = sae.fired == 0
    for learner in learners:
        learner.forget_pass()
    sae.n_tokens_since_fired[silent] = 10**9
    sae.note_since_fired(sae.n_tokens_since_fired)
    Layers(learners).accumulate(x, y)
    gradient = sae.W_dec.grad
    assert gradient is not None
    assert gradient[silent, :4].abs().sum() > 0
    assert gradient[silent, 4:].abs().sum() == 0
