"""Describes a training job's launch: a summary, the required memory and time, and the job's row in the store."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from sae_tui.jobs.launch.kinds import LaunchKind
from sae_tui.jobs.launch.memory_need import FreeMemory, Need, PeakMemory, measured_peak, of_same_shape
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.launch.ways import Way, chosen_rows
from trainer.contract.paths import DataDir
from trainer.contract.planning import memory
from trainer.contract.planning.check_job import Machine, MachineGpu
from trainer.contract.planning.forecast import DeviceMemory
from trainer.contract.planning.hardware import CPU, read_box
from trainer.contract.planning.model_placement import place_model
from trainer.contract.planning.outlook import Outlook
from trainer.contract.planning.step_time import run_seconds
from trainer.contract.planning.workload import Layout, Workload, steps_of, with_model_gpus
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members
from trainer.contract.settings.sources import DataShape
from trainer.contract.store.rows import Job
from trainer.contract.wording import duration, gibibytes, plural

# The maximum number of a sweep's SAEs that a summary lists.
MOST_SHOWN = 6


class LaunchTraining(LaunchKind[JobConfig, Outlook]):
    """A training job's launch."""

    heading = "Data and training"

    def needs(self, look: Outlook, measured: PeakMemory | None = None) -> str:
        where = plural(look.devices, "GPU" if look.on_gpus else "CPU process")
        each = f" {'on' if look.on_gpus else 'in'} each of {where}"
        needs = f"needs {gibibytes(look.needs_bytes)}{each if look.devices > 1 else ''}, {look.mode}"
        if look.placed and (look.placed.model_gpus or look.placed.why):
            needs += f"; {look.placed.sentence}"
        return f"{needs}; {measured}" if measured else needs

    def summary(self, job: JobConfig, look: Outlook, *, device: str = "cuda", past: Iterable[Job] = ()) -> str:
        """Return a string like `2 GPUs, ddp · effective batch 8192 = 4096 × 2 · needs 3.1 GiB per GPU · about 12 min`.

        For a sweep, the text starts with a list of the SAEs. The stated time is based on a finished job of the same
        shape on the same type of device. If there is no such job, the stated time is an estimate.
        """
        devices, work = look.devices, look.settled.work
        where = plural(devices, "GPU" if look.on_gpus else "CPU process")
        batch, factors = str(work.tokens_per_step), _factors(work)
        if len(factors) > 1:
            batch += " = " + " × ".join(map(str, factors))
        alone = _tokens_per_step_on_one(job)
        if devices > 1 and alone != work.tokens_per_step:
            batch += f" ({alone} on 1 {'GPU' if look.on_gpus else 'process'})"
        each = f" per {'GPU' if look.on_gpus else 'process'}" if devices > 1 else ""
        seconds, measured = expected_seconds(job, look, device, past)
        parts = [
            *([_sweep(job)] if job.sweep else []),
            f"{where}, {look.mode}",
            f"effective batch {batch}",
            f"needs {gibibytes(look.needs_bytes)}{each}",
            f"about {duration(seconds)}" + ("" if measured else ", estimated"),
            *([look.placed.sentence] if look.placed and (look.placed.model_gpus or look.placed.why) else []),
        ]
        return " · ".join(parts)

    def seconds(self, job: JobConfig, look: Outlook, *, device: str, past: Iterable[Job]) -> float:
        return expected_seconds(job, look, device, past)[0]

    def ways(self, job: JobConfig, on: Machine, gpus: Sequence[MachineGpu], counts: Iterable[int]) -> list[Way]:
        busy = [gpu.index for gpu in gpus if gpu.busy]
        shape = job.data_shape(on.promises)
        return chosen_rows(job, shape, gpus, on.speeds, counts=counts, cuda=on.cuda, busy=busy)

    def measured(self, job: JobConfig, look: Outlook, device: str, past: Iterable[Job]) -> PeakMemory | None:
        return measured_peak(job, look.settled.work.shape, look.devices, look.mode, device, past)

    def need(self, job: JobConfig, look: Outlook, free: FreeMemory, *, device: str, past: Iterable[Job] = ()) -> Need:
        takes = Need(
            look.fullest,
            sharing=1 if look.on_gpus else look.devices,
            measured=measured_peak(job, look.settled.work.shape, look.devices, look.mode, device, past),
            taken_bytes=look.needs_bytes,
            on_gpus=look.on_gpus,
        )
        if not takes.lacks(free):
            return takes
        return msgspec.structs.replace(takes, remedies=tuple(look.remedies(free.free_bytes or 0)), judged_lacking=True)

    def row(self, data: DataDir, job: JobConfig, placement: Placement, past: Iterable[Job]) -> dict[str, Any]:
        device, look = placement.device, placement.look
        if not isinstance(look, Outlook):
            look = _outlook_as_before(data, job, job.data_shape(), placement)
        settled = look.settled
        in_rank = look.needs_bytes
        if look.on_gpus and device == "cpu":
            in_rank = memory.estimate(settled.work).total
        return {
            "card_memory_bytes": look.needs_bytes if placement.gpus_wanted else None,
            "estimated_memory_bytes": in_rank,
            "expected_s": expected_seconds(job, look, device, past)[0],
            "mode": look.mode if job.parallel.mode == "auto" else job.parallel.mode,
            "total_steps": steps_of(job, placement.world_size),
            "d_in": settled.work.shape.d_in,
            "d_out": settled.work.shape.d_out,
        }


def _outlook_as_before(data: DataDir, job: JobConfig, shape: DataShape, placement: Placement) -> Outlook:
    """Return a job's outlook on its former devices.

    All that is known about these devices is how much memory the job needed on each of them.
    """
    devices, on_gpus = placement.world_size, placement.gpus_wanted > 0
    name, capacity = CPU if placement.device == "cpu" else "", DeviceMemory(placement.had_bytes, placement.had_bytes)
    memory_of = "" if on_gpus else None
    placed = place_model(job, shape, devices, name, read_box(data.box_file), capacity, memory_of)
    return Outlook(placed.settled, on_gpus, placed.is_measured, placed=placed)


def expected_seconds(job: JobConfig, look: Outlook, device: str, past: Iterable[Job]) -> tuple[float, bool]:
    """Return the duration of a job's steps in seconds, and whether it is taken from a finished job of the same shape.

    If there is no such job, the duration is an estimate.
    """
    work = look.settled.work
    # With halving, a past job's last speed applies only to the SAEs that remained.
    alike = () if job.train.halving else of_same_shape(job, work.shape, look.devices, look.mode, device, past)
    if rate := next((done.tokens_per_s for done in alike if done.tokens_per_s), None):
        return work.total_tokens / rate, True
    return max(1.0, run_seconds(work, look.settled.time)), False


def _factors(work: Workload) -> list[int]:
    """Return the factors of the effective batch size: micro-batch size, number of micro-batches, data-parallel ranks.

    Factors of 1 are omitted. Return [] if the product of the factors is not the effective batch size.
    """
    factors = (work.micro_batch, work.micro_batches, work.data_ranks)
    return [factor for factor in factors if factor != 1] if math.prod(factors) == work.tokens_per_step else []


def _tokens_per_step_on_one(job: JobConfig) -> int:
    """Return the effective batch size of the job on one device."""
    return Layout(with_model_gpus(job.replace("parallel", mode="single"), 1, 0), 1).tokens_per_step


def _sweep(job: JobConfig) -> str:
    """Return a string like `3 SAEs: k=16, k=32, k=64`; if there are more than 6 SAEs, list only the first 5.

    For a sweep over k of a TopK SAE, mention that a single SAE can be trained for several k.
    """
    labels = [label.replace(",", " ") for label in members(job)]
    shown = labels if len(labels) <= MOST_SHOWN else [*labels[: MOST_SHOWN - 1], "…"]
    is_over_k = [axis.path for axis in job.sweep] == ["sae.k"] and job.sae.architecture == "topk"
    other = " (hierarchical_topk trains a single SAE for several k)" * is_over_k
    return f"{plural(len(labels), 'SAE')}: {', '.join(shown)}{other}"
