"""Tests for the estimate of a job's GPU memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.workloads import workload

from trainer.contract.planning import activation_memory
from trainer.contract.planning.hardware import CPU
from trainer.contract.planning.memory import (
    CUDA_CONTEXT_BYTES,
    PROCESS_BYTES,
    WORKSPACE_BYTES,
    checkpoint_bytes,
    estimate,
    n_parameters,
    nccl_bytes,
    of_plain_steps,
    on_disk,
    remedies,
    state_bytes,
)
from trainer.contract.planning.rows_on_gpu import bytes_of_rows
from trainer.contract.settings.job import JobConfig

MakeJob = Callable[..., JobConfig]
sizes = st.integers(1, 2**17)


def total(make_job: MakeJob, d_in: int, d_sae: int, batch_size: int, world_size: int, **train: Any) -> int:
    job = make_job(sae={"d_sae": d_sae}, train={"batch_size": batch_size, **train})
    return estimate(workload(job, d_in, world_size)).total


def of_tensors(make_job: MakeJob, *sizes: int, **train: Any) -> int:
    """Return the estimated memory without NCCL's buffers, which a single rank does not need."""
    return total(make_job, *sizes, **train) - nccl_bytes(workload(make_job(), 1, sizes[-1]))


@given(d_in=sizes, d_sae=sizes, batch_size=sizes, world_size=st.integers(1, 8), more=st.integers(1, 1000))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_larger_sizes_need_more_memory_and_more_ranks_never_need_more_per_rank(
    make_job: MakeJob, d_in: int, d_sae: int, batch_size: int, world_size: int, more: int
) -> None:
    # Deterministic mode disables CUDA graphs.
    # Otherwise, a single GPU would capture small steps, but not large ones, in CUDA graphs, which need extra memory.
    of = partial(of_tensors, deterministic=True)
    least = of(make_job, d_in, d_sae, batch_size, world_size)
    assert of(make_job, d_in, d_sae + more, batch_size, world_size) > least
    # With few tokens, the forward and backward passes need less memory than the subsequent weight update.
    assert of(make_job, d_in, d_sae, batch_size + more, world_size) >= least
    assert of(make_job, d_in, d_sae, batch_size + 64 * d_sae, world_size) > least
    assert of(make_job, d_in + more, d_sae, batch_size, world_size) > least
    assert of(make_job, d_in, d_sae, batch_size, world_size + 1) <= least


def test_parameters_are_counted_exactly(make_job: MakeJob) -> None:
    d_in, d_sae = 384, 3072
    parameters = {"W_enc": (d_in, d_sae), "W_dec": (d_sae, d_in), "b_enc": (d_sae,), "b_dec": (d_in,)}
    stored = sum(np.zeros(shape, np.float32).nbytes for shape in parameters.values())
    memory = estimate(workload(make_job(sae={"d_sae": d_sae}), d_in, 1))
    assert (memory.weights, memory.gradients, memory.optimizer) == (stored, stored, stored)


def test_captured_sparse_steps_need_extra_memory_only_for_few_tokens(make_job: MakeJob) -> None:
    def slack(n_tokens: int, **train: Any) -> int:
        job = make_job(
            sae={"architecture": "jumprelu", "d_sae": 24576, "k": 32}, train={"batch_size": n_tokens, **train}
        )
        return estimate(workload(job, 768, 1)).slack

    # Deterministic mode captures no CUDA graphs.
    assert slack(4096) == slack(4096, deterministic=True)
    assert slack(256) > slack(256, deterministic=True)


def test_replicas_add_gradients_in_place_and_latent_shards_divide_all_but_the_batch(make_job: MakeJob) -> None:
    sae, train = {"d_sae": 24576}, {"batch_size": 4096}
    alone_job = make_job(sae=sae, train=train)
    alone = estimate(workload(alone_job, 768, 1))
    ddp = {"mode": "ddp", "zero": False}
    replica = estimate(workload(make_job(sae=sae, train=train, parallel=ddp), 768, 4))
    # Each replica stores its share of the held-out rows. Evaluating on a single GPU needs additional memory because the
    # captured steps stay in memory.
    evaluated = activation_memory.of_evaluation(workload(alone_job, 768, 1), alone_job)
    assert alone.slack - replica.slack == 4 * 768 * 32_768 * 3 // 4 + evaluated + WORKSPACE_BYTES
    nccl = nccl_bytes(workload(alone_job, 768, 4))
    assert msgspec.structs.replace(replica, slack=alone.slack) == msgspec.structs.replace(alone, communication=nccl)
    sharded = estimate(workload(make_job(sae=sae, train=train, parallel={"mode": "ddp"}), 768, 4))
    assert sharded.optimizer == alone.optimizer / 4
    # The passes read 16-bit copies of all weights, so a rank keeps fp32 weights for its own latents only.
    assert sharded.weights == pytest.approx(alone.weights / 4, rel=1e-3)
    assert (sharded.gradients, sharded.activations) == (alone.gradients, alone.activations)
    in_fp32 = make_job(sae=sae, train=train | {"precision": "fp32"}, parallel={"mode": "ddp"})
    assert estimate(workload(in_fp32, 768, 4)).weights == alone.weights
    shared = estimate(workload(make_job(sae=sae, train=train, parallel={"mode": "tensor"}), 768, 4))
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(shared, name) == pytest.approx(getattr(alone, name) / 4, rel=1e-3)
    assert alone.communication == 0 < nccl < shared.communication
    hybrid = make_job(sae=sae, train=train, parallel={"mode": "hybrid", "latent_ranks": 4, "zero": False})
    of_groups = estimate(workload(hybrid, 768, 8))
    assert of_groups.communication == shared.communication + 2 * nccl
    assert msgspec.structs.replace(of_groups, slack=shared.slack, communication=shared.communication) == shared


@pytest.mark.parametrize(
    ("name", "n_gpus", "mode", "gigabytes"),
    [
        ("NVIDIA H100 80GB HBM3", 1, "auto", 0),
        ("NVIDIA H100 80GB HBM3", 2, "ddp", 0.8),
        ("NVIDIA A100-SXM4-80GB", 4, "ddp", 2.5),
        ("NVIDIA H100 80GB HBM3", 8, "ddp", 4.3),
        ("NVIDIA H100 80GB HBM3", 8, "tensor", 4.3),
        # In hybrid mode, NCCL creates one group of eight GPUs, two groups of four, and four pairs.
        ("NVIDIA H100 80GB HBM3", 8, "hybrid", 4.3 + 2.5 + 0.8),
        # The threads of one process communicate without NCCL.
        ("NVIDIA H100 80GB HBM3", 8, "dp", 0),
        ("NVIDIA GeForce RTX 4090", 8, "ddp", 0.3),
        ("NVIDIA H100 PCIe", 8, "ddp", 0.3),
        ("NVIDIA A100-PCIE-40GB", 8, "tensor", 0.3),
        ("", 2, "ddp", 0.3),
        (CPU, 8, "ddp", 0),
    ],
)
def test_nccl_memory_depends_on_the_link_and_the_number_of_gpus_and_groups(
    make_job: MakeJob, name: str, n_gpus: int, mode: str, gigabytes: float
) -> None:
    parallel = {"mode": mode} | ({"latent_ranks": 4} if mode == "hybrid" else {})
    work = workload(make_job(parallel=parallel), 768, n_gpus).on_device(name)
    assert nccl_bytes(work) / 1e9 == pytest.approx(gigabytes, abs=0.1)
    assert estimate(work).communication >= nccl_bytes(work)


def test_a_cluster_node_needs_buffers_only_for_its_own_gpus(make_job: MakeJob) -> None:
    launch = {"backend": "slurm", "nodes": 2, "gpus": "auto:8"}
    name = "NVIDIA H100 80GB HBM3"
    of_two_nodes = workload(make_job(parallel={"mode": "ddp"}, launch=launch), 768, 16).on_device(name)
    of_one = workload(make_job(parallel={"mode": "ddp"}), 768, 8).on_device(name)
    assert nccl_bytes(of_two_nodes) == nccl_bytes(of_one)


def test_memory_counted_by_pytorch_excludes_nccl(make_job: MakeJob) -> None:
    work = workload(make_job(parallel={"mode": "ddp"}), 768, 8)
    by_pcie, by_nvlink = (work.on_device(name) for name in ("RTX 4090", "NVIDIA H200"))
    assert estimate(by_nvlink).total - estimate(by_pcie).total == nccl_bytes(by_nvlink) - nccl_bytes(by_pcie) > 0
    assert of_plain_steps(by_nvlink, is_compiled=True) == of_plain_steps(by_pcie, is_compiled=True)


@pytest.mark.parametrize(
    ("train", "on_gpu", "on_cpu"),
    [
        ({}, 4, 8),
        ({"state": "fp32"}, 8, 8),
        ({"state": "bf16"}, 4, 4),
        ({"state": "int8"}, 2.1, 2.1),
        ({"optimizer": "signum"}, 4, 4),
        ({"optimizer": "muon"}, 4, 4),
    ],
)
def test_the_memory_for_an_optimizers_state_depends_on_its_settings_and_the_device(
    make_job: MakeJob, train: dict[str, Any], on_gpu: float, on_cpu: float
) -> None:
    job = make_job(sae={"d_sae": 64}, train=train)
    n_parameters = 2 * 8 * 64 + 64 + 8
    for work, n_bytes in ((workload(job, 8, 1), on_gpu), (workload(job, 8, 1).on_device(CPU), on_cpu)):
        assert state_bytes(job.train, work.device) == n_bytes
        assert estimate(work).optimizer == round(n_bytes * n_parameters)
        assert checkpoint_bytes(work) == round((4 + n_bytes) * n_parameters)


def test_a_transcoders_decoder_is_as_wide_as_the_targets(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 64})
    parameters = 8 * 64 + 64 * 24 + 64 + 24
    assert n_parameters(workload(job, 8, d_out=24), job.sae) == parameters
    assert estimate(workload(job, 8, 1, d_out=24)).weights == 4 * parameters
    assert estimate(workload(job, 8, 1, d_out=8)).total > estimate(workload(job, 8, 1)).total


@pytest.mark.parametrize("parallel", [{"mode": "tensor"}, {"mode": "ddp", "zero": True}], ids=str)
def test_every_rank_holds_the_full_skip_connection(make_job: MakeJob, parallel: dict[str, Any]) -> None:
    without, with_skip = (
        estimate(workload(make_job(sae={"d_sae": 64, "skip": skip}, parallel=parallel), 8, 4, d_out=24))
        for skip in (False, True)
    )
    assert with_skip.weights - without.weights == with_skip.gradients - without.gradients == 4 * 8 * 24
    assert with_skip.optimizer - without.optimizer == 4 * 8 * 24


@given(widths=st.lists(st.integers(32, 4096), min_size=1, max_size=5, unique=True), d_in=st.integers(1, 512))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sweep_holds_the_states_of_all_saes_and_the_activations_of_one(
    make_job: MakeJob, widths: list[int], d_in: int
) -> None:
    together = estimate(workload(make_job(sae={"d_sae": widths}), d_in, 2))
    alone = [estimate(workload(make_job(sae={"d_sae": width}), d_in, 2)) for width in widths]
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(together, name) == sum(getattr(one, name) for one in alone)
    assert together.communication == alone[0].communication
    assert together.context == alone[0].context
    assert max(one.activations for one in alone) <= together.activations <= sum(one.activations for one in alone) + 5


def test_sparse_architectures_keep_only_pre_activations_but_dense_ones_keep_more(make_job: MakeJob) -> None:
    wide = 4 * 4096 * 3072
    settings = {"sae": {"d_sae": 3072}, "train": {"batch_size": 4096, "precision": "fp32"}}
    chosen = estimate(workload(make_job(**settings), 384)).activations
    assert 1.2 * wide < chosen < 4 * wide
    settings["sae"]["architecture"] = "gated"
    assert 7 * wide < estimate(workload(make_job(**settings), 384)).activations < 9 * wide
    # On a CPU, a gated SAE's latents are also selected sparsely.
    assert estimate(workload(make_job(**settings), 384, device="cpu")).activations <= chosen


def test_16_bit_matmuls_halve_the_pre_activations(make_job: MakeJob) -> None:
    def needed(precision: str, batch_size: int, device: str = "cuda") -> int:
        job = make_job(sae={"d_sae": 3072}, train={"batch_size": batch_size, "precision": precision})
        return estimate(workload(job, 384, 1, device=device)).activations

    assert needed("bf16", 8192) == needed("fp16", 8192) == needed("auto", 8192) < needed("fp32", 8192)
    # On a CPU, the maxima of groups of latents are not stored.
    assert 0.9 * needed("fp32", 8192) < needed("auto", 8192, "cpu") <= needed("fp32", 8192)


def test_disk_space_covers_the_newest_and_best_and_one_spare_checkpoint_for_each_sae(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 64})
    parameters = n_parameters(workload(job, 8), job.sae)
    assert on_disk(workload(job, 8)) == (2 + 2) * 8 * parameters + 4 * parameters
    assert on_disk(workload(job.replace("train", keep_checkpoints=5), 8)) == (5 + 2) * 8 * parameters + 4 * parameters
    assert on_disk(workload(make_job(sae={"d_sae": 64}, train={"seed": [0, 1, 2]}), 8)) == 3 * on_disk(workload(job, 8))
    assert on_disk(workload(make_job(sae={"d_sae": 64}, train={"optimizer": "signum"}), 8)) == (4 * 8 + 4) * parameters


@pytest.mark.parametrize(("device", "context"), [("cuda", CUDA_CONTEXT_BYTES), ("cpu", PROCESS_BYTES)])
def test_the_estimate_includes_a_cuda_context_on_a_gpu_and_a_process_on_the_cpu(
    make_job: MakeJob, device: str, context: int
) -> None:
    assert estimate(workload(make_job(), 384, 1, device=device)).context == context


def test_a_typical_job_fits_a_typical_gpu(make_job: MakeJob) -> None:
    assert 1 < estimate(workload(make_job(sae={"d_sae": 16384}), 768, 1)).total / 2**30 < 8


def test_suggested_remedies_make_a_job_fit(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 65536}, train={"precision": "fp32", "batch_size": 16384})
    needed = estimate(workload(job, 768, 4)).total
    assert remedies(workload(job, 768, 4), needed) == [
        'train.precision = "bf16"',
        'parallel.mode = "tensor"',
        "train.batch_size = 8192",
    ]
    tight = needed * 2 // 3
    advice = remedies(workload(job, 768, 4), tight)
    assert advice
    for setting in advice:
        section, _, assignment = setting.partition(".")
        key, _, value = assignment.partition(" = ")
        changed = job.replace(section, **{key: int(value) if value.isdigit() else value.strip('"')})
        assert estimate(workload(changed, 768, 4)).total <= tight
    assert remedies(workload(job, 768, 1), 10**8) == []
    assert 'parallel.mode = "tensor"' not in remedies(workload(job, 768, 1), needed)


def test_a_compiled_update_saves_memory_for_signum_but_not_for_muon(make_job: MakeJob) -> None:
    def spared(optimizer: str) -> int:
        # With only 64 tokens, the weight update has the highest memory use.
        sae, train = {"d_sae": 4096, "auxk_alpha": 0.0}, {"batch_size": 64, "optimizer": optimizer}
        work = workload(make_job(sae=sae, train=train), 1024)
        plain, compiled = (of_plain_steps(work, is_compiled=one) for one in (False, True))
        return plain - compiled

    assert spared("adam") == spared("muon") == 0
    assert 4 * 4096 * 1024 <= spared("signum") < 1.2 * 4 * 4096 * 1024


# Memory in MB that PyTorch 2.11 with CUDA 13 reserved on an H200 for four steps without AuxK or evaluation. For d_in
# 768, the SAE has 24,576 latents and k is 32; for d_in 2,304, it has 65,536 latents and k is 64. torch compiled only
# Signum's update.
RESERVED: tuple[tuple[int, str, dict[str, Any], float], ...] = (
    (768, "topk", {}, 1059.1),
    (768, "topk", {"precision": "fp32"}, 1163.9),
    (768, "topk", {"batch_size": 32768}, 2606.8),
    (768, "matryoshka_batch_topk", {}, 1040.2),
    (768, "jumprelu", {}, 3235.9),
    (768, "gated", {}, 4074.8),
    (768, "standard", {}, 2250.2),
    (2304, "topk", {}, 6385.8),
    (2304, "topk", {"state": "int8"}, 4479.5),
    (2304, "batch_topk", {}, 6385.8),
    (2304, "topk", {"optimizer": "signum"}, 3932.2),
)


@pytest.mark.parametrize(("d_in", "architecture", "train", "reserved"), RESERVED, ids=str)
def test_the_memory_estimate_is_within_a_tenth_of_the_measured_memory(
    make_job: MakeJob, d_in: int, architecture: str, train: dict[str, Any], reserved: float
) -> None:
    sizes = {768: {"d_sae": 24576, "k": 32}, 2304: {"d_sae": 65536, "k": 64}}[d_in]
    is_compiled = train.get("optimizer") == "signum"
    moments = {} if is_compiled else {"state": "fp32"}
    job = make_job(sae=sizes | {"architecture": architecture}, train={"batch_size": 4096} | moments | train)
    assert of_plain_steps(workload(job, d_in), is_compiled=is_compiled) / 1e6 == pytest.approx(reserved, rel=0.1)


@pytest.mark.parametrize(("ranks", "n_batches"), [(2, 2.5), (3, 2), (8, 2)])
def test_a_rank_that_reads_row_shards_holds_three_shards_and_one_full_batch_in_memory(
    make_job: MakeJob, ranks: int, n_batches: float
) -> None:
    job = make_job(data={"path": "acts", "held_out_tokens": 0}, train={"batch_size": 128}, parallel={"mode": "tensor"})
    assert bytes_of_rows(workload(job, 16, ranks)) == n_batches * 4 * 128 * 16
    alone = job.replace("parallel", mode="ddp")
    assert bytes_of_rows(workload(alone, 16, ranks)) == 2 * 4 * 128 * 16
