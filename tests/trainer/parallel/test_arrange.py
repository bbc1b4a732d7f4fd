"""Tests that ranks choose a mode that fits in the memory they are allowed to use."""

from __future__ import annotations

import pytest
import torch
from support.workloads import workload

from trainer.contract.planning import memory
from trainer.contract.planning.choose_mode import PlannedResources, settle
from trainer.contract.planning.hardware import CPU, assumed_speeds
from trainer.contract.planning.plan import read_plan
from trainer.contract.planning.workload import Workload
from trainer.contract.wording import gibibytes
from trainer.parallel import arrange
from trainer.parallel.group import Group
from trainer.parallel.process_group import World
from trainer.parallel.threads import Threads, on_all


@pytest.mark.timeout(200)
def test_ranks_use_no_more_memory_than_they_are_allowed_to(make_job, start_ranks, tmp_path) -> None:
    job = make_job(sae={"d_sae": 4096}, train={"batch_size": 800, "n_steps": 1, "deterministic": True})
    free = PlannedResources(assumed_speeds(CPU, "fp32"))
    assert settle(Workload(job, 2, job.data_shape(), CPU), free).job.parallel.mode == "ddp"
    ddp, tensor = (
        memory.estimate(workload(job.replace("parallel", mode=mode), job.data_shape().d_in, 2, device="cpu")).total
        for mode in ("ddp", "tensor")
    )
    assert tensor < ddp
    ranks = start_ranks(job, 2, may_take_bytes=(ddp + tensor) // 2)
    assert ranks.wait() == [0, 0]
    plan = read_plan(tmp_path / "run" / "attempt1" / "plan.json")
    assert plan
    assert plan.mode != "ddp"
    assert plan.needs_bytes <= (ddp + tensor) // 2
    # The reason states the allowed memory, not the free memory.
    least = gibibytes((ddp + tensor) // 2)
    assert plan.reason == f"{plan.mode} on 2: no other mode fits into the {least} that each rank may use"


@pytest.mark.parametrize(("gpus", "agreed"), [(("bf16", "fp16"), "fp16"), (("fp16", "tf32"), "tf32")])
def test_ranks_on_different_gpus_agree_on_a_precision_that_is_fast_on_all_gpus(
    gpus: tuple[str, str], agreed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrange, "resolve_precision", lambda asked, device: gpus[device.index])

    def of_rank(group: Threads) -> str:
        world = World(torch.device("cpu", group.index), group)
        return arrange._precision_of_all(world, "auto")

    assert on_all(2, of_rank) == [agreed, agreed]


def test_ranks_read_parts_of_the_rows_only_if_all_ranks_agree() -> None:
    def agreed(*own: bool) -> list[bool]:
        cpu = torch.device("cpu")
        return on_all(len(own), lambda group: arrange._all_true(own[group.index], World(cpu, group)), timeout_s=60)

    assert agreed(True, True, True) == [True] * 3
    assert agreed(True, False, True) == [False] * 3


@pytest.mark.parametrize("mode", ["ddp", "tensor"])
def test_memory_already_held_by_nccl_is_not_reserved_again(
    mode: str, make_job, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = workload(make_job(parallel={"mode": mode}), 384, 2).on_device("NVIDIA H100 80GB HBM3")
    left = memory.estimate(work).total - memory.context_bytes("cuda") - memory.nccl_bytes(work)
    monkeypatch.setattr(arrange, "_free_bytes", lambda _device: left)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    def fits(group: Threads, may_take: int | None = None) -> bool:
        free = arrange._free_of_all(World(torch.device("cpu"), group), work, may_take)
        return settle(work, PlannedResources(assumed_speeds("NVIDIA H100", "bf16"), min(free))).fits

    assert on_all(2, fits) == [True, True]
    left -= 1
    assert on_all(2, fits) == [False, False]


def test_hybrid_mode_reserves_memory_for_groups_that_are_not_yet_connected(make_job, monkeypatch) -> None:
    job = make_job(parallel={"mode": "hybrid", "latent_ranks": 2})
    work = workload(job, 384, 4).on_device("NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(arrange, "_free_bytes", lambda _device: 10**9)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    world = World(torch.device("cpu"), type("Four", (Group,), {"size": 4})())
    (free,) = arrange._free_of_all(world, work, None)
    pairs = memory.nccl_bytes(workload(make_job(), 384, 2).on_device(work.device_name))
    assert free == 10**9 + memory.outside_pytorch(work) - 2 * pairs


def test_ranks_on_different_gpus_base_their_estimates_on_the_same_gpu() -> None:
    gpus = ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 3090", "NVIDIA H100 80GB HBM3")

    def of_rank(group: Threads) -> str:
        return arrange._name_of_all(World(torch.device("cpu"), group), gpus[group.index])

    assert on_all(3, of_rank) == [gpus[1]] * 3
