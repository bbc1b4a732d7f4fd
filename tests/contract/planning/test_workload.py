from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainer.contract.planning.hardware import CPU
from trainer.contract.planning.workload import Layout, Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members, parse_job
from trainer.contract.settings.sources import DataShape

MakeJob = Callable[..., JobConfig]
SHAPE = DataShape(8, None, 10**6)


def test_the_job_and_its_number_of_ranks_determine_steps_and_tokens_and_mode(make_job: MakeJob) -> None:
    job = make_job(train={"batch_size": 64, "accumulate": 3, "n_tokens": 1000})
    layout = Layout(job, 2)
    assert layout.tokens_per_step == 64 * 3 * 2
    assert layout.total_steps == 3  # a step has 384 tokens, so 1,000 tokens are 2.6 steps
    assert layout.total_tokens == 3 * 384
    assert Layout(job.replace("train", n_steps=7), 2).total_steps == 7
    assert (Layout(job, 1).mode, layout.mode) == ("single", "ddp")
    assert Layout(job.replace("parallel", mode="ddp"), 1).mode == "ddp"


@pytest.mark.parametrize(
    ("mode", "latent_ranks", "data_ranks"), [("ddp", 1, 4), ("tensor", 4, 1), ("hybrid", 2, 2), ("sweep", 1, 1)]
)
def test_a_mode_determines_which_ranks_share_latents_and_which_share_tokens(
    make_job: MakeJob, mode: str, latent_ranks: int, data_ranks: int
) -> None:
    layout = Layout(make_job(parallel={"mode": mode}), 4)
    assert (layout.latent_ranks, layout.data_ranks) == (latent_ranks, data_ranks)


@pytest.mark.parametrize(("scaling", "factor"), [("off", 1), ("sqrt", 2), ("linear", 4)])
def test_the_learning_rate_scales_with_the_tokens_per_step(make_job: MakeJob, scaling: str, factor: float) -> None:
    job = make_job(train={"batch_size": 4096, "lr_scaling": scaling, "lr_tokens": 4096})
    assert Layout(job, 4).lr_scale == factor


@pytest.mark.parametrize(
    ("train", "ranks", "tokens", "steps"),
    [
        ({"n_tokens": 100_000_000}, 1, 4096, 24_415),
        ({"n_tokens": 1_000_000}, 1, 1984, 505),
        ({"n_tokens": 300_000}, 1, 576, 521),
        ({"n_tokens": 10_000}, 1, 512, 20),
        # All ranks together use about as many tokens per step as a single rank, but at least 64 tokens each.
        ({"n_tokens": 1_000_000}, 4, 1792, 559),
        ({"n_tokens": 10_000}, 3, 576, 18),
        ({"n_tokens": 10_000}, 16, 1024, 10),
        ({"n_tokens": 1_000_000, "accumulate": 2}, 1, 1920, 521),
        ({"n_tokens": 1_000_000, "global_batch_size": 8000}, 1, 8000, 125),
        ({"n_tokens": 1_000_000, "n_steps": 7}, 2, 8192, 7),
    ],
)
def test_a_run_with_few_tokens_has_small_steps_unless_their_size_is_set(
    make_job: MakeJob, train: dict[str, int], ranks: int, tokens: int, steps: int
) -> None:
    layout = Layout(make_job(train=train), ranks)
    assert (layout.tokens_per_step, layout.total_steps) == (tokens, steps)


@pytest.mark.parametrize(
    ("train", "factor"),
    [({"batch_size": 256}, 0.5), ({"batch_size": 2048}, 1), ({"batch_size": 256, "lr": 0.01}, 1)],
)
def test_only_an_automatic_rate_is_reduced_for_small_steps(
    make_job: MakeJob, train: dict[str, Any], factor: float
) -> None:
    assert Layout(make_job(train=train), 1).lr_scale == factor


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_adam_averages_over_fewer_steps_in_a_shorter_run(make_job: MakeJob, optimizer: str) -> None:
    settings = make_job(train={"optimizer": optimizer}).train.settings
    for_runs = [settings.for_run(n_steps, "cpu") for n_steps in (10, 500, 10_000, 10**6)]
    assert [one.beta1 for one in for_runs] == [0.75, 0.75, 0.9, 0.9]
    assert [one.beta2 for one in for_runs] == [0.95, 0.98, 0.999, 0.999]
    given = make_job(train={"optimizer": optimizer, "beta1": 0.8, "beta2": 0.9}).train.settings
    resolved = given.for_run(500, "cpu")
    assert (resolved.beta1, resolved.beta2) == (0.8, 0.9)


@pytest.mark.parametrize(("optimizer", "shares"), [("adam", True), ("signum", False), ("muon", False)])
def test_replicas_shard_an_elementwise_optimizer(make_job: MakeJob, optimizer: str, shares: bool) -> None:
    job = make_job(train={"optimizer": optimizer})
    assert Layout(job, 2).uses_zero(job.train) is shares
    assert not Layout(job.replace("parallel", zero=False), 2).uses_zero(job.train)


def test_each_sae_in_a_sweep_has_its_own_optimizer(make_job: MakeJob) -> None:
    layout = Layout(make_job(train={"optimizer": ["adam", "muon"]}), 2)
    assert [layout.uses_zero(member.train) for member in layout.members.values()] == [True, False]
    assert not layout.is_elementwise


def test_saes_are_placed_so_that_ranks_are_balanced(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": [4096, 1024, 3072], "k": 8}, parallel={"mode": "sweep"})
    placed = Layout(job, 2).members_by_rank
    assert [sum(member.sae.d_sae or 0 for member in saes.values()) for saes in placed] == [4096, 4096]


@pytest.mark.parametrize(
    ("section", "changes"),
    [("parallel", {"mode": "tensor"}), ("train", {"batch_size": 77, "global_batch_size": 154, "precision": "bf16"})],
)
def test_changed_settings_apply_to_each_sae_in_a_sweep(
    make_job: MakeJob, section: str, changes: dict[str, Any]
) -> None:
    job = make_job(sae={"k": [4, 8]}, train={"seed": [0, 1]})
    work = Workload(job, 2, SHAPE)
    changed = work.with_settings(section, **changes).on(4).on_device(CPU)
    assert changed == Workload(job.replace(section, **changes), 4, SHAPE, CPU)
    assert changed.members == members(changed.job)
    assert work.members == members(job)


@pytest.mark.parametrize(
    ("name", "asked", "precision", "n_bytes"),
    [
        (CPU, "auto", "fp32", 4),
        ("", "auto", "bf16", 2),
        ("NVIDIA H200", "auto", "bf16", 2),
        ("Tesla V100-SXM2-16GB", "auto", "fp16", 2),
        ("Tesla T4", "auto", "fp16", 2),
        ("NVIDIA GeForce RTX 2080 Ti", "auto", "fp16", 2),
        ("NVIDIA TITAN RTX", "auto", "fp16", 2),
        ("NVIDIA TITAN Xp", "auto", "tf32", 4),
        ("Tesla P100-PCIE-16GB", "auto", "tf32", 4),
        ("NVIDIA GeForce GTX 1080 Ti", "auto", "tf32", 4),
        ("NVIDIA RTX 2000 Ada Generation", "auto", "bf16", 2),
        ("NVIDIA GeForce RTX 3090", "auto", "bf16", 2),
        ("Tesla V100-SXM2-16GB", "tf32", "tf32", 4),
        ("NVIDIA H200", "fp32", "fp32", 4),
    ],
)
def test_auto_chooses_a_precision_that_is_fast_on_the_device(
    make_job: MakeJob, name: str, asked: str, precision: str, n_bytes: int
) -> None:
    work = Workload(make_job(train={"precision": asked}), 1, SHAPE, name)
    assert (work.precision, work.product_bytes) == (precision, n_bytes)


def test_layers_that_share_their_errors_are_not_trained_in_fp16() -> None:
    sae = {"cross_layer": True, "architecture": "batch_topk"}
    job, problems = parse_job({"data": {"path": "x", "hook": ["mlp.0", "mlp.1"]}, "sae": sae})
    assert job is not None, problems
    work = Workload(job, 1, DataShape(16, 16, 1000), "Tesla T4")
    assert (work.precision, work.product_bytes) == ("fp32", 4)
