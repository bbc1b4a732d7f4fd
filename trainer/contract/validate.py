"""`check(job, machine)`: everything that would keep a job from running, before it is launched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainer.contract import memory
from trainer.contract.config import JobConfig
from trainer.contract.problems import JobFileError, Problem
from trainer.contract.shards import ShardSet, inspect_shards


class MachineGpu(msgspec.Struct, frozen=True):
    """A GPU as the checks see it; `busy` and `unhealthy` are reasons, empty where there is none."""

    index: int
    name: str
    memory_free_bytes: int | None
    busy: str = ""
    unhealthy: str = ""


class Machine(msgspec.Struct, frozen=True):
    """The box a job is checked against."""

    gpus: tuple[MachineGpu, ...]
    cpu_count: int
    output_root: Path


def check(job: JobConfig, machine: Machine) -> list[Problem]:
    """All problems of a job on this machine, errors and warnings, each naming its setting."""
    problems: list[Problem] = []
    shards = _collect(problems, lambda: inspect_shards(job.data.knobs.path))  # type: ignore[attr-defined]
    problems += _check_devices(job, machine)
    if shards:
        problems += _check_sae(job, shards)
        problems += _check_length(job, shards)
        problems += _check_memory(job, shards, machine)
        problems += _check_disk(job, shards, machine)
    return problems


def chosen_indices(job: JobConfig) -> list[int]:
    """The GPUs a job file names by index; empty for "auto" and "cpu"."""
    return list(job.launch.gpus) if isinstance(job.launch.gpus, list) else []


def wanted_ranks(job: JobConfig) -> int:
    """How many ranks the job file asks for; 1 where it says "auto" or "cpu"."""
    gpus = job.launch.gpus
    if isinstance(gpus, list):
        return len(gpus)
    _, _, count = gpus.partition(":")
    return int(count or 1)


def _collect(problems: list[Problem], action: Callable[[], ShardSet]) -> ShardSet | None:
    try:
        return action()
    except JobFileError as error:
        problems += error.problems
        return None


def _check_devices(job: JobConfig, machine: Machine) -> list[Problem]:
    problems = []
    by_index = {gpu.index: gpu for gpu in machine.gpus}
    for index in chosen_indices(job):
        if index not in by_index:
            known = ", ".join(map(str, by_index)) or "none"
            problems.append(Problem("launch.gpus", f"there is no GPU {index} here; this machine has {known}"))
        elif by_index[index].unhealthy:
            problems.append(Problem("launch.gpus", f"GPU {index} cannot be used: {by_index[index].unhealthy}"))
        elif by_index[index].busy:
            problems.append(Problem("launch.gpus", f"GPU {index} is busy: {by_index[index].busy}", "warning"))
    problems += _check_count(job, machine)
    if job.launch.max_restarts:
        message = "restarts are not made yet; a job that crashes ends as failed"
        problems.append(Problem("launch.max_restarts", message, "warning"))
    if job.parallel.mode == "single" and wanted_ranks(job) > 1:
        message = f'"single" runs on one device, but launch.gpus asks for {wanted_ranks(job)}; use "ddp" or "auto"'
        problems.append(Problem("parallel.mode", message))
    return problems


def _check_count(job: JobConfig, machine: Machine) -> list[Problem]:
    """Whether the machine has as many devices as "auto:4" or "cpu:4" asks for."""
    ranks, usable = wanted_ranks(job), sum(not gpu.unhealthy for gpu in machine.gpus)
    if str(job.launch.gpus).startswith("auto:") and ranks > usable:
        here = f"{usable} that can be used" if machine.gpus else f'none; use "cpu:{ranks}"'
        return [Problem("launch.gpus", f"asks for {ranks} GPU{'s' * (ranks > 1)}, but this machine has {here}")]
    if str(job.launch.gpus).startswith("cpu:") and ranks > machine.cpu_count:
        message = f"starts {ranks} processes on {machine.cpu_count} cores, which is slower than one for each core"
        return [Problem("launch.gpus", message, "warning")]
    return []


def _check_sae(job: JobConfig, shards: ShardSet) -> list[Problem]:
    d_sae = job.sae.width(shards.d_in)
    k = getattr(job.sae.knobs, "k", None)
    problems = []
    if k is not None and k > d_sae:
        problems.append(Problem("sae.k", f"must be at most the number of latents, {d_sae}, not {k}"))
    if d_sae < shards.d_in:
        message = f"{d_sae} latents for {shards.d_in} dimensions is not overcomplete; expected at least {shards.d_in}"
        problems.append(Problem("sae.d_sae" if job.sae.d_sae else "sae.expansion_factor", message, "warning"))
    return problems


def _check_length(job: JobConfig, shards: ShardSet) -> list[Problem]:
    ranks = wanted_ranks(job)
    batch = job.effective_batch(ranks)
    if batch > shards.n_tokens:
        message = f"one step takes {batch:,} tokens, but {job.data.knobs.path} holds {shards.n_tokens:,}"  # type: ignore[attr-defined]
        most = shards.n_tokens // ranks
        return [Problem("train.batch_size", f"{message}; make batch_size × accumulate at most {most:,}")]
    tokens = job.total_steps(ranks) * batch
    if tokens > 20 * shards.n_tokens:
        message = f"{tokens:,} tokens are {tokens / shards.n_tokens:.0f} passes over {shards.n_tokens:,} stored ones"
        return [Problem("train.n_steps" if job.train.n_steps else "train.n_tokens", message, "warning")]
    return []


def _check_memory(job: JobConfig, shards: ShardSet, machine: Machine) -> list[Problem]:
    needed = memory.estimate(job, shards.d_in, wanted_ranks(job)).total
    return [
        Problem(
            "launch.gpus",
            f"GPU {gpu.index} has {_gb(gpu.memory_free_bytes)} free, the job needs about {_gb(needed)}; "
            "lower train.batch_size or sae.d_sae, or choose another GPU",
            "warning",
        )
        for gpu in machine.gpus
        if gpu.index in chosen_indices(job) and gpu.memory_free_bytes is not None and gpu.memory_free_bytes < needed
    ]


def _check_disk(job: JobConfig, shards: ShardSet, machine: Machine) -> list[Problem]:
    # A checkpoint holds weights and two moments, 12 bytes per parameter; two are kept while a third is written.
    parameters = 2 * shards.d_in * job.sae.width(shards.d_in)
    needed = 3 * 12 * parameters + 4 * parameters
    root = machine.output_root
    while not os.path.exists(root):
        root = root.parent
    disk = shutil.disk_usage(root)
    # A file system without a size, like /proc, says nothing of space; that it takes no folder is told at launch.
    if disk.total and disk.free < needed:
        message = f"checkpoints and SAE need about {_gb(needed)}, but {root} has {_gb(disk.free)} free; free some space"
        return [Problem("--data-dir", message)]
    return []


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GB"
