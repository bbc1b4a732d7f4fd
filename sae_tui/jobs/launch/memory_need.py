"""The memory needed by a job: an estimate, a similar job's peak, and settings that would make the job fit."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from sae_tui.jobs.gpus.availability import GpuChoice
from trainer.contract.machine_memory import machine_memory
from trainer.contract.planning import memory
from trainer.contract.planning.check_job import UsedBefore
from trainer.contract.planning.forecast import DeviceMemory
from trainer.contract.planning.hardware import CPU
from trainer.contract.planning.memory import Memory
from trainer.contract.planning.outlook import Outlook, Took
from trainer.contract.planning.workload import Workload, ranks_of
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.contract.settings.sources import DataShape
from trainer.contract.settings.toml import table_of
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState
from trainer.contract.wording import gibibytes

# The peak measured by PyTorch excludes the CUDA context. The process size includes Python and PyTorch.
COUNTED = {"cuda": "without the CUDA context", "cpu": "libraries included"}


class PeakMemory(msgspec.Struct, frozen=True):
    """A rank's peak memory in a finished job: the reserved GPU memory ("cuda") or the process size ("cpu")."""

    job_id: int
    peak_bytes: int
    device: str

    def __str__(self) -> str:
        return f"measured {gibibytes(self.peak_bytes)} in job {self.job_id}, {COUNTED[self.device]}"


class FreeMemory(msgspec.Struct, frozen=True):
    """The free memory on the fullest of a job's GPUs, or on the machine if the job runs on the CPU.

    `free_bytes` is None if it is unknown, and `where` is the name of the GPU or the machine.
    """

    free_bytes: int | None = None
    where: str = ""


class Need(msgspec.Struct, frozen=True):
    """The memory needed by each of a job's ranks; on the CPU, `sharing` ranks share the machine's memory."""

    parts: Memory
    sharing: int = 1
    measured: PeakMemory | None = None
    remedies: tuple[str, ...] = ()
    # The advice shown if there are no remedies.
    otherwise: str = "a smaller batch_size or d_sae"
    # True if too little memory was free when the remedies were computed.
    judged_lacking: bool = False
    # The memory requirement from the outlook; it may be measured, so it replaces the sum of `parts`.
    taken_bytes: int | None = None
    on_gpus: bool = True

    @property
    def rank_bytes(self) -> int:
        """The bytes that each rank needs; all views show this amount, and the queue waits until it is free."""
        return self.taken_bytes or self.parts.total

    @property
    def measured_bytes(self) -> int | None:
        return self.measured.peak_bytes if self.measured else None

    def lacks(self, capacity: FreeMemory) -> bool:
        """Return whether less memory is free than the job needs, or False if the free memory is unknown."""
        return capacity.free_bytes is not None and capacity.free_bytes < self.rank_bytes * self.sharing


def used_before(past: Iterable[Job]) -> UsedBefore:
    """Return a function that looks up how much GPU memory the newest finished job of the same shape used."""

    def find(job: JobConfig, data: DataShape, look: Outlook) -> Took | None:
        peak = measured_peak(job, data, look.devices, look.mode, "cuda", past)
        return Took(peak.job_id, peak.peak_bytes + memory.outside_pytorch(look.settled.held)) if peak else None

    return find


def capacity_on_gpus(choices: Iterable[GpuChoice], gpus: Sequence[int]) -> FreeMemory:
    """Return the free memory on the fullest of these GPUs, ignoring GPUs that do not report their memory."""
    free = [
        (choice.memory_free_bytes, f"GPU {choice.index}")
        for choice in choices
        if choice.index in gpus and choice.memory_free_bytes is not None
    ]
    return FreeMemory(*min(free)) if free else FreeMemory()


def capacity_on_cpu() -> FreeMemory:
    """Return how much of this machine's memory is available to new processes without swapping."""
    return FreeMemory(machine_memory().available_bytes, "this machine")


def memory_of_host() -> DeviceMemory:
    """Return this machine's host memory: the memory that is available without swapping, and the total memory."""
    memory = machine_memory()
    return DeviceMemory(memory.available_bytes, memory.total_bytes)


def measured_peak(
    job: JobConfig, data: DataShape, devices: int, mode: str, device: str, past: Iterable[Job]
) -> PeakMemory | None:
    """Return the peak memory of the newest finished job of the same shape and mode; `past` is sorted newest first."""
    alike = of_same_shape(job, data, devices, mode, device, past)
    return next(
        (PeakMemory(done.id, done.peak_memory_bytes, device) for done in alike if done.peak_memory_bytes is not None),
        None,
    )


def of_same_shape(
    job: JobConfig, data: DataShape, devices: int, mode: str, device: str, past: Iterable[Job]
) -> Iterator[Job]:
    """Yield the finished jobs on this type of device whose steps need the same memory and computation.

    The jobs are yielded in the order of `past`.
    """
    wanted = None
    for done in past:
        if done.state != JobState.FINISHED or done.d_in is None:
            continue
        same_place = (done.device, done.world_size, done.mode) == (device, devices, mode)
        if not same_place or (done.d_in, done.d_out) != (data.d_in, data.d_out):
            continue
        # Ignore the row count, which is not recorded and affects only how many rows are held out.
        wanted = wanted or _shape(job, data._replace(n_tokens=0), devices, mode, device)
        if _recorded_shape(done.config, done.d_in, done.d_out, devices, mode, device) == wanted:
            yield done


def _shape(job: JobConfig, data: DataShape, devices: int, mode: str, device: str) -> tuple[Any, ...]:
    """Return a key that is equal for jobs with equal memory use: the estimate, and settings it may misjudge."""
    asked = job.parallel, job.model_gpus
    work = Workload(job.replace("parallel", mode=mode), ranks_of(job, devices), data, CPU if device == "cpu" else "")
    saes = [
        (one.sae.architecture, one.sae.width(data.d_in), work.micro_batch, one.train.precision, one.train.optimizer)
        for one in work.members.values()
    ]
    return asked, saes, memory.estimate(work)


@functools.lru_cache(maxsize=512)
def _recorded_shape(
    config: str, d_in: int, d_out: int | None, devices: int, mode: str, device: str
) -> tuple[Any, ...] | None:
    """Return the result of `_shape` for a recorded job file, or None if this version cannot read the file."""
    job, _ = parse_job(table_of(config))
    return _shape(job, DataShape(d_in, d_out, 0), devices, mode, device) if job else None
