from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.workloads import workload

from trainer.contract.planning import first_look, memory
from trainer.contract.planning.choose_mode import PlannedResources, settle
from trainer.contract.planning.hardware import CPU, Speeds
from trainer.contract.planning.step_time import reads_parts, step_time, wire_of
from trainer.contract.planning.workload import Layout, Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members
from trainer.contract.settings.sources import DataShape

MakeJob = Callable[..., JobConfig]
NVLINK = Speeds(700e12, 4e12, 360e9, 25e-6, is_measured=True)
STAGED = Speeds(60e12, 0.8e12, 10e9, 25e-6, is_measured=True)
# Measured speeds of one of two CPU cores, including the speed of a reduction between the cores.
CORE = Speeds(100e9, 15e9, 2e9, 1e-4, is_measured=True)
GPT2_XL = DataShape(2304, None, 10**9)


def wide(make_job: MakeJob, **train: Any) -> JobConfig:
    return make_job(sae={"d_sae": 65536, "k": 64}, train={"precision": "bf16", "batch_size": 4096} | train)


def test_tensor_mode_is_chosen_for_a_wide_sae_and_explained_on_one_line(make_job: MakeJob) -> None:
    settled = settle(Workload(wide(make_job), 4, GPT2_XL), PlannedResources(STAGED))
    assert settled.job.parallel.mode == "tensor"
    assert settled.reason.startswith("tensor on 4: ")
    assert "× less time than " in settled.reason
    assert "\n" not in settled.reason


def test_a_narrow_sae_with_a_large_batch_is_replicated(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 1024, "k": 8}, train={"batch_size": 2**17})
    assert settle(Workload(job, 2, DataShape(64, None, 10**9)), PlannedResources(STAGED)).job.parallel.mode == "ddp"


@pytest.mark.parametrize("flag", ["amx_bf16", "avx512_bf16"])
@pytest.mark.parametrize(("d_sae", "mode"), [(3072, "ddp"), (16384, "tensor")])
def test_two_cpu_processes_use_the_mode_that_was_faster_when_measured(
    make_job: MakeJob, d_sae: int, mode: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The costs were measured on CPUs with instruction sets that the test machine's CPU may lack.
    monkeypatch.setattr(first_look, "costs", lambda: first_look._COSTS[flag])
    job = make_job(sae={"d_sae": d_sae, "k": 32}, train={"batch_size": 2048, "precision": "fp32"})
    assert settle(Workload(job, 2, DataShape(384, None, 10**9), CPU), PlannedResources(CORE)).job.parallel.mode == mode


def test_a_mode_that_does_not_fit_is_not_chosen_even_if_it_is_fastest(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 16384, "k": 8}, train={"batch_size": 2**16})
    shape = DataShape(256, None, 10**9)
    work, free = Workload(job, 4, shape), PlannedResources(STAGED)
    assert settle(work, free).job.parallel.mode == "ddp"
    needs = memory.estimate(workload(job.replace("parallel", mode="ddp"), 256, 4)).total
    narrow = settle(work, msgspec.structs.replace(free, free_bytes=needs - 1))
    assert narrow.job.parallel.mode != "ddp"
    assert narrow.needs_bytes < needs


def test_if_no_mode_fits_the_one_that_needs_the_least_memory_is_chosen_with_a_reason(make_job: MakeJob) -> None:
    settled = settle(Workload(wide(make_job), 2, GPT2_XL), PlannedResources(STAGED, free_bytes=10**9))
    assert not settled.fits
    assert settled.reason.endswith(" GiB, but each rank may use only 0.9 GiB")


def test_a_requested_mode_is_kept(make_job: MakeJob) -> None:
    job = wide(make_job).replace("parallel", mode="ddp")
    settled = settle(Workload(job, 4, GPT2_XL), PlannedResources(STAGED))
    assert (settled.job, settled.reason) == (job, "")


def test_an_automatic_batch_is_the_largest_that_fits(make_job: MakeJob) -> None:
    job = wide(make_job, batch_size="auto", global_batch_size=2**16)
    roomy, narrow = (
        settle(Workload(job, 1, GPT2_XL), PlannedResources(NVLINK, free_bytes=gb * 10**9)).job for gb in (140, 12)
    )
    assert Layout(roomy, 1).micro_batches < Layout(narrow, 1).micro_batches
    assert memory.estimate(workload(narrow, 2304, 1)).total <= 12 * 10**9
    twice = narrow.replace("train", batch_size=2 * Layout(narrow, 1).micro_batch)
    assert memory.estimate(workload(twice, 2304, 1)).total > 12 * 10**9


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranks=st.integers(1, 8),
    batch=st.one_of(st.just("auto"), st.integers(1, 9000)),
    accumulate=st.integers(1, 4),
    fixed=st.one_of(st.none(), st.integers(8, 50_000)),
    mode=st.sampled_from(["auto", "auto", "ddp", "tensor"]),
    free_gb=st.one_of(st.none(), st.floats(0.1, 100)),
)
def test_dividing_a_step_among_ranks_never_changes_its_token_count(
    make_job: MakeJob, ranks: int, batch: Any, accumulate: int, fixed: int | None, mode: str, free_gb: float | None
) -> None:
    train = {"batch_size": batch, "accumulate": accumulate} | ({"global_batch_size": fixed} if fixed else {})
    job = make_job(sae={"d_sae": 4096}, train=train, parallel={"mode": mode})
    work = Workload(job, ranks, DataShape(384, None, 10**9))
    free = None if free_gb is None else round(free_gb * 1e9)
    chosen = settle(work, PlannedResources(STAGED, free_bytes=free)).work
    assert chosen.tokens_per_step == work.tokens_per_step
    assert chosen.total_steps == work.total_steps
    assert "auto" not in (chosen.job.parallel.mode, chosen.job.train.batch_size)
    tokens = chosen.micro_batch * chosen.micro_batches * chosen.data_ranks
    assert 0 <= tokens - chosen.tokens_per_step < chosen.micro_batches * chosen.data_ranks


def test_ranks_exchange_the_bytes_of_a_ring_all_reduce_and_of_candidate_latents(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 3072, "k": 32}, train={"batch_size": 4096, "precision": "fp32"})
    ddp, tensor = (wire_of(workload(job.replace("parallel", mode=mode), 384, 4)).n_bytes for mode in ("ddp", "tensor"))
    ring = 2 * 3 / 4 * 4
    assert ddp == ring * (2 * 384 * 3072 + 3072 + 384)
    # Each rank selects latents for its share of the tokens, and sends one byte per candidate.
    assert tensor == ring * 4096 * 384 + 3 / 4 * 4096 * 32 * (4 + 1)


def test_bf16_gradients_halve_the_bytes_that_replicas_send(make_job: MakeJob) -> None:
    job = make_job(parallel={"mode": "ddp", "zero": False})
    whole, half = (
        wire_of(workload(job.replace("parallel", gradients=kind), 16, 2)).n_bytes for kind in ("fp32", "bf16")
    )
    assert half == whole / 2
    # With ZeRO, an all-gather of 16-bit weights replaces the second half of the gradient all-reduce.
    sharded = (
        wire_of(workload(make_job(parallel={"gradients": kind, "mode": "ddp"}), 16, 2)).n_bytes
        for kind in ("fp32", "bf16")
    )
    assert list(sharded) == [0.75 * whole, 0.5 * whole]


def test_the_estimated_step_time_is_at_most_twice_the_ideal(make_job: MakeJob) -> None:
    # An ideal step takes 4.07 ms on an H200.
    # That is 1.57 ms for matmuls, 0.25 ms for activations, 1.97 ms for Adam, and 0.28 ms for gradients.
    # The estimate must be less than twice the ideal.
    time = step_time(workload(wide(make_job, batch_size=4096), 2304, 1), Speeds(788e12, 4.3e12, 1, 0))
    assert 4.07e-3 < time.passes_s + time.update_s < 2 * 4.07e-3


@pytest.mark.parametrize(("mode", "added"), [("ddp", (0.3e-3, 0.8e-3)), ("tensor", (0.3e-3, 1e-3))])
def test_auxk_adds_about_the_same_time_to_a_step_in_all_modes(
    make_job: MakeJob, mode: str, added: tuple[float, float]
) -> None:
    # At this size, AuxK takes 0.5 ms on one H200. Ranks that shard the latents exchange another 75 MB for AuxK.
    batch_size = 4096 * (8 if mode == "tensor" else 1)
    job = wide(make_job, batch_size=batch_size).replace("parallel", mode=mode)
    time = step_time(workload(job, 2304, 8), NVLINK)
    assert added[0] < time.auxk_s < added[1]
    assert time.with_dead_s == time.total_s + time.auxk_s
    without = make_job(sae={"auxk_alpha": 0.0}, train={"precision": "bf16"})
    assert step_time(workload(without, 64, 8), NVLINK).auxk_s == 0


@pytest.mark.parametrize("speeds", [NVLINK, STAGED], ids=["nvlink", "staged"])
@pytest.mark.parametrize("n_ranks", [2, 4, 8])
def test_the_chosen_mode_is_not_much_slower_after_latents_have_died(
    make_job: MakeJob, n_ranks: int, speeds: Speeds
) -> None:
    time = settle(Workload(wide(make_job), n_ranks, GPT2_XL), PlannedResources(speeds)).time
    assert time.total_s < time.with_dead_s < 1.3 * time.total_s


def test_cuda_graphs_reduce_the_host_overhead_on_a_single_gpu(make_job: MakeJob) -> None:
    # On an H200, such a step took 1.15 ms with CUDA graphs, or 1.42 ms with AuxK; see docs/performance.md.
    sae, h200 = {"d_sae": 24576, "k": 32}, Speeds(788e12, 4.3e12, 1, 0)
    train: dict[str, Any] = {"precision": "bf16", "batch_size": 4096}
    replayed = step_time(workload(make_job(sae=sae, train=train), 768), h200)
    assert 0.9e-3 < replayed.total_s < 1.42e-3
    plain = [make_job(sae=sae, train=train | one) for one in ({"deterministic": True}, {"precision": "fp32"})]
    assert all(step_time(workload(one, 768), h200).total_s >= 1.5e-3 for one in plain)
    small = make_job(sae={"d_sae": 1024, "k": 8}, train=train)
    assert step_time(workload(small, 64), h200).total_s == pytest.approx(0.4e-3)
    # A CPU has no CUDA graphs.
    assert step_time(workload(small, 64, device="cpu"), CORE).update_s > 0.5e-3


def test_a_sweep_with_enough_saes_is_distributed_over_devices(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 65536, "k": [61, 62, 63, 64]}, train={"precision": "bf16", "batch_size": 4096})
    settled = settle(Workload(job, 4, GPT2_XL), PlannedResources(NVLINK))
    assert settled.job.parallel.mode == "sweep"
    assert Layout(settled.job, 4).tokens_per_step == Layout(job, 4).tokens_per_step
    assert wire_of(workload(settled.job, 2304, 4)).n_bytes == 0
    alone, together = (memory.estimate(workload(one, 2304, 4)) for one in (settled.job, job))
    # In sweep mode, each of the four ranks holds all weights of one SAE.
    # In the other modes, each rank holds a quarter of the weights of all SAEs.
    assert alone.weights == together.weights
    assert alone.gradients * 4 == together.gradients
    assert settle(Workload(job, 8, GPT2_XL), PlannedResources(NVLINK)).job.parallel.mode != "sweep"


def test_an_optimizer_that_needs_full_matrices_never_gets_a_shard_of_the_latents(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 65536, "k": 64}, train={"optimizer": ["adam", "muon"]})
    for free in (None, 8 * 10**9):
        assert settle(Workload(job, 4, GPT2_XL), PlannedResources(STAGED, free_bytes=free)).work.latent_ranks == 1


def test_the_saes_in_a_sweep_are_parsed_once_for_all_modes(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[JobConfig] = []

    def count(job: JobConfig) -> dict[str, JobConfig]:
        parsed.append(job)
        return members(job)

    monkeypatch.setattr("trainer.contract.planning.workload.members", count)
    job = make_job(sae={"d_sae": 65536, "k": [16, 32, 64]}, train={"batch_size": "auto"})
    settle(Workload(job, 8, GPT2_XL), PlannedResources(STAGED, free_bytes=20 * 10**9))
    assert parsed == [job]


@pytest.mark.parametrize("mode", ["ddp", "tensor"])
def test_a_skip_connection_costs_two_matmuls_and_a_gradient_reduction(make_job: MakeJob, mode: str) -> None:
    train, parallel = {"batch_size": 4096}, {"mode": mode}
    works = [
        workload(make_job(sae={"d_sae": 4096, "skip": skip}, train=train, parallel=parallel), 512, 2, d_out=256)
        for skip in (False, True)
    ]
    # With unlimited memory bandwidth, only matmuls take time.
    without, with_skip = (step_time(work, Speeds(1e12, 1e30, 1e9, 0)).passes_s for work in works)
    tokens = 4096 if mode == "ddp" else 2048
    assert with_skip - without == pytest.approx(2 * 2 * tokens * 512 * 256 / 1e12)
    sent = [wire_of(work).n_bytes for work in works]
    assert sent[1] - sent[0] == pytest.approx(4 * 512 * 256)


def read_parts(make_job: MakeJob, ranks: int, speeds: Speeds, *, device: str = "", **changes: Any) -> bool:
    job = wide(make_job, batch_size=4096 * ranks)
    for section, keys in ({"parallel": {"mode": "tensor"}} | changes).items():
        job = job.replace(section, **keys)
    return reads_parts(Workload(job, ranks, GPT2_XL, device), speeds, ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_read_shards_of_rows_if_the_gpu_bus_is_faster_than_host_memory(make_job: MakeJob, ranks: int) -> None:
    assert read_parts(make_job, ranks, NVLINK)
    assert not read_parts(make_job, ranks, STAGED)


def test_ranks_read_all_rows_if_shards_would_delay_the_exchanges_in_a_step(make_job: MakeJob) -> None:
    # At 20 GB/s, exchanging row shards among eight ranks is as fast as host memory, but slower than the encoder.
    pcie = msgspec.structs.replace(NVLINK, bus_bytes_per_s=20e9)
    assert not read_parts(make_job, 8, pcie)
    assert not read_parts(make_job, 2, NVLINK, train={"batch_size": 16})


def test_data_parallel_ranks_and_cpu_ranks_read_all_of_their_rows(make_job: MakeJob) -> None:
    assert not read_parts(make_job, 4, NVLINK, parallel={"mode": "ddp"})
    assert not read_parts(make_job, 4, NVLINK, device=CPU)
    assert not read_parts(make_job, 1, NVLINK)
    hybrid = {"mode": "hybrid", "latent_ranks": 4}
    assert read_parts(make_job, 8, NVLINK, parallel=hybrid, train={"batch_size": 16384})


def on_two_nodes(gbit: float) -> Speeds:
    return msgspec.structs.replace(NVLINK, nodes=2, node_bytes_per_s=gbit * 1e9 / 8, node_latency_s=5e-5)


@pytest.mark.parametrize(
    ("mode", "sharing", "sent"),
    [("ddp", 2, 1.0), ("hybrid", 2, 1.0), ("hybrid", 8, 1.0), ("hybrid", 4, 1.0)],
)
def test_between_two_nodes_only_one_copy_of_the_gradients_is_sent(make_job: MakeJob, mode, sharing, sent) -> None:
    job = make_job(sae={"d_sae": 65536, "k": 64}, parallel={"mode": mode, "latent_ranks": sharing, "zero": False})
    wire = wire_of(workload(job, 2304, 16), nodes=2)
    n_bytes = 4 * memory.n_parameters(workload(job, 2304, 16), job.sae, 1)
    # All ranks of a node together send the gradients of all latents once, however the ranks share the latents.
    assert wire.node_bytes == pytest.approx(sent * n_bytes, rel=1e-3)
    assert wire_of(workload(job, 2304, 16)).node_bytes == 0


def test_on_two_nodes_the_latents_are_sharded_inside_each_node(make_job: MakeJob) -> None:
    work = Workload(wide(make_job, batch_size=32768), 16, GPT2_XL)
    slow, fast = (settle(work, PlannedResources(on_two_nodes(gbit))) for gbit in (25, 6400))
    assert (slow.job.parallel.mode, slow.job.parallel.latent_ranks) == ("hybrid", 8)
    assert "per step from each node at 3.1 GB/s" in slow.reason
    # The reconstructions of a group of ranks that spans both nodes would cross the link in every micro-batch.
    across = wire_of(slow.work.with_settings("parallel", mode="tensor"), nodes=2)
    assert across.node_bytes > wire_of(slow.work, nodes=2).node_bytes
    assert fast.time.total_s < slow.time.total_s
