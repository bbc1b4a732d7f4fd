"""Where a job runs: which GPUs suit it best, and what `launch.gpus` stands for on this machine."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from sae_tui.jobs.availability import GpuChoice, fit
from sae_tui.jobs.words import duration, gigabytes, listed, plural
from trainer.contract import memory
from trainer.contract.box import CPU, Box, assumed_speeds
from trainer.contract.config import members, parse_job
from trainer.contract.forecast import settled_on
from trainer.contract.job import JobConfig
from trainer.contract.paths import DataDir
from trainer.contract.problems import JobFileError, Problem
from trainer.contract.records import Job
from trainer.contract.settle import Settled
from trainer.contract.source_knobs import DataShape
from trainer.contract.states import JobState
from trainer.contract.validate import Machine, MachineGpu, wanted_ranks

# SAEs of a sweep that are named in one line.
MOST_SHOWN = 6
NOTHING_MEASURED = Box()


class Recommendation(msgspec.Struct, frozen=True):
    """The GPUs to take, best first, a sentence per GPU, and why there are fewer than asked for."""

    gpus: tuple[int, ...]
    memory_required: int
    reasons: dict[int, str]
    shortfall: str = ""


class Placement(msgspec.Struct, frozen=True):
    """Where the ranks of a job run; on simulated GPUs the device is the CPU, but the GPUs are leased.

    With `any_gpus` the job takes as many as it has ranks, whichever can be had first. Those that SLURM chooses are
    none of this machine's.
    """

    device: Literal["cuda", "cpu"]
    gpus: tuple[tuple[int, str], ...]
    world_size: int
    any_gpus: bool = False

    @property
    def gpus_wanted(self) -> int:
        return self.world_size if self.any_gpus else len(self.gpus)


def recommend(choices: Iterable[GpuChoice], needed_bytes: int, count: int) -> Recommendation:
    """Up to `count` GPUs that are free, readable and large enough, the one with most free memory first."""
    reasons, usable = {}, []
    for choice in choices:
        obstacle = _obstacle(choice, needed_bytes)
        reasons[choice.index] = obstacle or f"{gigabytes(choice.memory_free_bytes or 0)} free"
        if not obstacle:
            usable.append(choice)
    usable.sort(key=lambda choice: (-(choice.memory_free_bytes or 0), choice.index))
    gpus = tuple(choice.index for choice in usable[:count])
    return Recommendation(gpus, needed_bytes, reasons, _shortfall(gpus, reasons, count))


def memory_needed(job: JobConfig, n_gpus: int, data: DataShape | None = None) -> int:
    """Bytes per GPU; the shape is read from the job's activations unless given."""
    data = data or job.data_shape()
    return memory.estimate(job, data.d_in, n_gpus, d_out=data.d_out).total


def place(
    job: JobConfig, choices: Sequence[GpuChoice], *, source_cuda: bool, multi_gpu_enabled: bool = True
) -> Placement:
    """What `launch.gpus` stands for here; raises `JobFileError` naming it where that can never be had."""
    gpus = job.launch.gpus
    count = wanted_ranks(job)
    if job.by_slurm:
        return Placement("cpu" if str(gpus).startswith("cpu") else "cuda", (), count)
    if isinstance(gpus, str) and (gpus.startswith("cpu") or (gpus == "auto" and not choices)):
        return Placement("cpu", (), count)
    if count > 1 and not multi_gpu_enabled:
        raise _refused(f"asks for {count} GPUs, but multi_gpu_enabled is false in the settings; name one GPU")
    device: Literal["cuda", "cpu"] = "cuda" if source_cuda else "cpu"
    if not isinstance(gpus, list):
        _refuse_impossible(job, choices, count)
        return Placement(device, (), count, any_gpus=True)
    return Placement(device, tuple((gpu.index, gpu.uuid) for gpu in _named(gpus, choices)), count)


def machine(choices: Iterable[GpuChoice], data: DataDir) -> Machine:
    """This box as the checks of a job see it."""
    gpus = tuple(
        MachineGpu(
            index=choice.index,
            name=choice.name,
            memory_free_bytes=choice.memory_free_bytes,
            busy=choice.reason if choice.state == "busy" else "",
            unhealthy=choice.reason if choice.state == "unhealthy" else "",
        )
        for choice in choices
    )
    return Machine(gpus, os.cpu_count() or 1, data.root)


def slowest(names: Iterable[str]) -> str:
    """The kind of card that cards of other kinds wait for, by published figures."""
    return min(names, key=lambda name: assumed_speeds(name, "bf16").flops_per_s)


def summary(
    job: JobConfig,
    data: DataShape,
    n_gpus: int,
    *,
    device: str = "cuda",
    cards: Sequence[GpuChoice] = (),
    speeds: Box = NOTHING_MEASURED,
    past: Iterable[Job] = (),
) -> str:
    """`2 GPUs, ddp · effective batch 8192 = 4096 × 2 · needs 3.1 GB per GPU · about 12 min`, before it its sweep.

    No GPUs means CPU processes. The mode is what `auto` comes to on these cards. The time is that of a finished job on
    such a device, or else that of the model.
    """
    ranks = n_gpus or wanted_ranks(job)
    where = plural(n_gpus, "GPU") if n_gpus else plural(ranks, "CPU process")
    settled = settled_here(job, data, ranks, device=device, cards=cards, speeds=speeds)
    job = settled.job
    batch, factors = str(job.effective_batch(ranks)), _factors(job, ranks)
    if len(factors) > 1:
        batch += " = " + " × ".join(map(str, factors))
    needed = memory.estimate(job, data.d_in, ranks, d_out=data.d_out, device="cuda" if n_gpus else "cpu").total
    parts = [
        *([_sweep(job)] if job.sweep else []),
        f"{where}, {job.parallel.mode}",
        f"effective batch {batch}",
        f"needs {gigabytes(needed)}" + (f" per {'GPU' if n_gpus else 'process'}" if ranks > 1 else ""),
    ]
    seconds, measured = expected_seconds(settled, data, ranks, device, past)
    parts.append(f"about {duration(seconds)}" + ("" if measured else " by the model"))
    return " · ".join(parts)


def expected_seconds(
    settled: Settled, data: DataShape, ranks: int, device: str, past: Iterable[Job]
) -> tuple[float, bool]:
    """How long the steps of a job take, and whether a finished job on such a device says so, or else the model."""
    job = settled.job
    if rate := _expected_rate(job, data.d_in, ranks, device, past):
        return job.total_steps(ranks) * job.effective_batch(ranks) / rate, True
    return max(1.0, job.total_steps(ranks) * settled.time.total_s), False


def settled_here(
    job: JobConfig,
    data: DataShape,
    ranks: int,
    *,
    device: str,
    cards: Sequence[GpuChoice] = (),
    speeds: Box = NOTHING_MEASURED,
) -> Settled:
    """What `auto` comes to on these cards, or on CPU processes, as far as can be known before the ranks measure."""
    name = CPU if device == "cpu" else slowest(card.name for card in cards) if cards else ""
    return settled_on(job, data, speeds, name, ranks, None if device == "cpu" else _free(cards))[0]


def _free(cards: Sequence[GpuChoice]) -> int | None:
    """Of the fullest card, where all tell it."""
    found = [card.memory_free_bytes for card in cards if card.memory_free_bytes is not None]
    return min(found) if found and len(found) == len(cards) else None


def _factors(job: JobConfig, ranks: int) -> list[int]:
    """Of an effective batch: tokens, micro-batches and ranks that have tokens of their own."""
    found = (job.micro_batch(ranks), job.micro_batches(ranks), job.data_ranks(ranks))
    return [factor for factor in found if factor != 1] if math.prod(found) == job.effective_batch(ranks) else []


def _sweep(job: JobConfig) -> str:
    """`3 SAEs: k=16, k=32, k=64`; of many the first only."""
    labels = [label.replace(",", " ") for label in members(job)]
    shown = labels if len(labels) <= MOST_SHOWN else [*labels[: MOST_SHOWN - 1], "…"]
    return f"{plural(len(labels), 'SAE')}: {', '.join(shown)}"


def _obstacle(choice: GpuChoice, needed_bytes: int) -> str:
    return choice.reason if choice.state != "available" else fit(choice, needed_bytes)


def _shortfall(gpus: Sequence[int], reasons: dict[int, str], count: int) -> str:
    if len(gpus) == count:
        return ""
    if not reasons:
        return 'this machine has no GPUs; "cpu" runs the job on the CPU'
    others = [f"GPU {index}: {reason}" for index, reason in reasons.items() if index not in gpus]
    found = f"only {len(gpus)} of {count} GPUs" if gpus else "no GPU"
    return f"{found} can be had ({'; '.join(others) or f'this machine has {len(reasons)}'})"


def _named(indices: Sequence[int], choices: Sequence[GpuChoice]) -> list[GpuChoice]:
    """The GPUs of a list, busy ones included: the job then waits for them, or shares where it is to."""
    known = {choice.index: choice for choice in choices}
    missing = [index for index in indices if index not in known]
    if missing:
        here = listed([f"GPU {index}" for index in known]) if known else "no GPUs"
        raise _refused(f"there is no GPU {missing[0]} here; this machine has {here}")
    for index in indices:
        if known[index].state == "unhealthy":
            raise _refused(f"GPU {index} cannot be used: {known[index].reason}; choose another")
    return [known[index] for index in indices]


def _refuse_impossible(job: JobConfig, choices: Sequence[GpuChoice], count: int) -> None:
    """Who is on the cards now does not matter: the job waits for them."""
    if not choices:
        raise _refused(f'asks for {plural(count, "GPU")}, but this machine has none; use "cpu:{count}"')
    needed = memory_needed(job, count)
    empty = [
        msgspec.structs.replace(choice, state="available", memory_free_bytes=_room_of(choice))
        for choice in choices
        if choice.state != "unhealthy"
    ]
    large = [choice for choice in empty if choice.memory_free_bytes is not None and not fit(choice, needed)]
    if len(large) >= count:
        return
    if len(empty) < count:
        raise _refused(f"asks for {plural(count, 'GPU')}, but only {len(empty)} of {len(choices)} can be used here")
    if unknown := [choice.index for choice in empty if choice.memory_free_bytes is None]:
        named = listed([f"GPU {index}" for index in unknown])
        raise _refused(
            f"asks for any {plural(count, 'GPU')}, but what is free on {named} cannot be read; name the GPUs to use, "
            f"as in launch.gpus = [{unknown[0]}]"
        )
    most = max(choice.memory_free_bytes or 0 for choice in empty)
    found = f"{len(large)} of them" if large else "none"
    raise _refused(
        f"needs {gigabytes(needed)} on each of {plural(count, 'GPU')}, and {found} has so much (the largest "
        f"{gigabytes(most)}); lower train.batch_size or sae.d_sae, or share the latents over more GPUs"
    )


def _room_of(choice: GpuChoice) -> int | None:
    """What a job would have on the card if it were alone; None where what is free on it is not known."""
    if choice.memory_free_bytes is None:
        return None
    return choice.memory_usable_bytes or choice.memory_total_bytes


def _refused(message: str) -> JobFileError:
    return JobFileError([Problem("launch.gpus", message)])


def _expected_rate(job: JobConfig, d_in: int, ranks: int, device: str, past: Iterable[Job]) -> float | None:
    """Tokens per second of the newest finished job, scaled by latents and, on GPUs, by ranks."""
    for done in past:
        if done.state != JobState.FINISHED or done.device != device or not done.tokens_per_s:
            continue
        parsed, _ = parse_job(tomllib.loads(done.config))
        if parsed:
            # CPU ranks share the same cores, so that more of them are no faster.
            more = ranks / done.world_size if device == "cuda" else 1.0
            return done.tokens_per_s * more * _n_latents(parsed, d_in) / _n_latents(job, d_in)
    return None


def _n_latents(job: JobConfig, d_in: int) -> int:
    """Of all SAEs of a sweep."""
    return sum(member.sae.width(d_in) for member in members(job).values())
