"""Decides how the ranks share the work: measures the ranks, resolves "auto" settings, and makes the plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from trainer.contract.machine_memory import machine_memory
from trainer.contract.planning import hardware, memory, step_time
from trainer.contract.planning.choose_mode import PlannedResources, Settled, settle
from trainer.contract.planning.hardware import AUTO, CPU, Speeds, assumed_speeds, read_box, write_box
from trainer.contract.planning.plan import Plan
from trainer.contract.planning.rates import full_rate
from trainer.contract.planning.workload import Layout, Workload
from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sources import DataShape
from trainer.parallel import calibrate
from trainer.parallel.base import Parallel
from trainer.parallel.calibrate import device_name
from trainer.parallel.group import gather_bytes
from trainer.parallel.process_group import World
from trainer.parallel.shares import Shares, by_speed, even, parse_shares
from trainer.runtime.precision import resolve_precision, set_matmul_precision


class Arranged(NamedTuple):
    """The job with every setting resolved, this rank's parallel mode, and the plan to show."""

    job: JobConfig
    parallel: Parallel
    plan: Plan


def arrange(
    world: World,
    job: JobConfig,
    shape: DataShape,
    box_file: Path | None = None,
    may_take: int | None = None,
    model_why: str = "",
) -> Arranged:
    """Measure each rank's speed and free memory, and resolve the "auto" settings of `job`.

    Return the job, this rank's mode and the plan. All ranks use the same measurements, so they return the same job and
    plan. `shape` contains the data's widths, and `box_file` contains speeds measured in earlier runs. `may_take` is a
    rank's memory limit in bytes, and `model_why` is the reason for the language model's placement.
    """
    precision, device = _precision_of_all(world, job.train.precision), world.device
    job = job.replace("train", precision=precision)
    set_matmul_precision(precision)
    box, name = read_box(box_file), device_name(device)
    speeds = [box.speeds(name, precision, world.size, world.nodes)] * world.size
    # Always measure if there are several ranks, because another process may be slowing one of them down.
    if world.size > 1 or not speeds[0].is_measured:
        speeds = calibrate.measure(world, precision)
        if not all(one.is_measured for one in speeds):
            # One rank's assumed speeds are not comparable with another's measured speeds.
            speeds = [slowest(speeds)] * world.size
        elif box_file and world.group.index == 0:
            # Reread the file to keep any measurements that another run has written in the meantime.
            box = read_box(box_file)
            write_box(box_file, box.with_measured(name, precision, world.size, slowest(speeds)))
    # Always use measured speeds to split reads across ranks: the results do not depend on which rank reads a row.
    to_read_by = slowest(speeds)
    if job.train.deterministic:
        # Measured speeds vary between runs, and with them the order of additions. All ranks use the same assumed
        # speeds, even on heterogeneous GPUs, because they must make the same decision.
        speeds = [assumed_speeds(CPU if device.type == "cpu" else "", "fp32", world.nodes)] * world.size
    work = Workload(job, world.size, shape, _name_of_all(world, name))
    free = _free_of_all(world, work, may_take)
    place = PlannedResources(slowest(speeds), min(free) if free else None)
    settled = settle(work, place)
    capacity = _capacity(settled, free)
    shares = _shares(settled, speeds, capacity)
    mode = catalog.entry(catalog.PARALLEL, settled.job.parallel.mode, "parallel.mode").load()
    parallel: Parallel = mode(world, settled.job, shares)
    parallel.capacity, parallel.most_tokens = capacity, _most_tokens(settled, place)
    parallel.reads_parts = _all_true(step_time.reads_parts(settled.work, to_read_by, _ranks_on_this_host(world)), world)
    return Arranged(settled.job, parallel, _plan(settled, place.speeds, parallel.shares, model_why))


def _precision_of_all(world: World, asked: str) -> str:
    """Return the matmul precision; for "auto", return the best precision that is fast on all ranks.

    Ranks need the same precision, because gradients with different loss scales cannot be added.
    """
    own = resolve_precision(asked, world.device)
    if asked != "auto":
        return own
    of_all = world.group.gather(torch.tensor([AUTO.index(own)], device=world.device))
    return AUTO[int(of_all.min())]


def _name_of_all(world: World, own: str) -> str:
    """Return the slowest device's name; all ranks use it to estimate memory, so that their decisions agree."""
    return hardware.slowest(name.decode() for name in gather_bytes(world.group, own.encode(), world.device))


def slowest(speeds: Sequence[Speeds]) -> Speeds:
    """Return the minimum of each speed over the ranks, marked as measured only if every rank was measured."""
    return msgspec.structs.replace(
        speeds[0],
        flops_per_s=min(one.flops_per_s for one in speeds),
        memory_bytes_per_s=min(one.memory_bytes_per_s for one in speeds),
        is_measured=all(one.is_measured for one in speeds),
    )


def _shares(settled: Settled, speeds: Sequence[Speeds], capacity: list[float] | None) -> Shares:
    """Return the shares set in the job or, for "auto", shares proportional to speed within the memory limits."""
    asked, n_columns = settled.job.parallel.shares, settled.work.latent_ranks
    if asked == "even":
        return even(len(speeds) // n_columns, n_columns)
    if asked != "auto":
        return parse_shares(asked, n_columns)
    times = [step_time.step_time(settled.work, one) for one in speeds]
    return by_speed([1 / (time.passes_s + time.update_s) for time in times], n_columns, capacity)


def _capacity(settled: Settled, free: Sequence[int]) -> list[float] | None:
    """Return the fraction of all latents that fits into each rank's memory, or None if every rank has all latents."""
    n_columns = settled.work.latent_ranks
    beside = memory.outside_pytorch(settled.held)
    whole = n_columns * max(1, settled.needs_bytes - beside)
    return [max(0, n_bytes - beside) / whole for n_bytes in free] if n_columns > 1 else None


def _most_tokens(settled: Settled, place: PlannedResources) -> int:
    """Return the largest micro-batch in tokens, at most 4 times an even share, that fits into a rank's memory."""
    even_share = settled.work.micro_batch
    for times in (4.0, 3.0, 2.0, 1.5, 1.25):
        larger = settled.work.with_settings("train", batch_size=round(times * even_share), global_batch_size=None)
        needs = memory.estimate(larger).total
        if place.free_bytes is None or needs <= place.free_bytes:
            return round(times * even_share)
    return even_share


def _free_of_all(world: World, work: Workload, may_take: int | None) -> list[int]:
    """Return how many bytes each rank may use on its device, at most `may_take`.

    The result includes memory that is already allocated but is part of the estimate: the CUDA context, and the NCCL
    connections between all ranks.
    """
    # In hybrid mode, the row and column groups have not been connected yet.
    met = work.with_settings("parallel", mode="ddp") if work.mode == "hybrid" else work
    own = _free_bytes(world.device) / _processes_here(world) + memory.outside_pytorch(met)
    own = min(own, may_take or own)
    of_all = world.group.gather(torch.tensor([own], dtype=torch.float64, device=world.device))
    return [int(n_bytes) for n_bytes in of_all]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return machine_memory().available_bytes


def _processes_here(world: World) -> int:
    """Return the number of ranks that share the memory reported by `_free_bytes`."""
    return 1 if world.device.type == "cuda" else _ranks_on_this_host(world)


def _ranks_on_this_host(world: World) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world.size)))


def _all_true(own: bool, world: World) -> bool:
    """Return whether `own` is true on all ranks, which may be on different kinds of hosts."""
    return bool(world.group.gather(torch.tensor([int(own)], device=world.device)).min())


def _plan(settled: Settled, speeds: Speeds, shares: Shares, model_why: str) -> Plan:
    work = settled.work
    return Plan(
        mode=work.mode,
        ranks=work.ranks,
        latent_ranks=work.latent_ranks,
        tokens_per_step=work.tokens_per_step,
        micro_batch=work.micro_batch,
        micro_batches=work.micro_batches,
        step_s=settled.time.total_s,
        needs_bytes=settled.needs_bytes,
        token_shares=shares.tokens,
        latent_shares=shares.latents,
        reason=settled.reason,
        text_parts=step_time.text_parts(work),
        model_share=step_time.source_s(work, speeds) / settled.time.total_s,
        model_gpus=work.model_gpus,
        model_why=model_why,
        lr={
            label: full_rate(
                Layout(member, work.ranks),
                member.sae.width(work.shape.d_in),
                is_transcoder=work.shape.d_out is not None,
            )
            for label, member in work.members.items()
        },
        precision=settled.job.train.precision,
    )
