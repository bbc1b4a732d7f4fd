"""What a job takes of a device's memory: estimated, measured in a job of the same shape, and what would make it fit."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from sae_tui.jobs.availability import GpuChoice
from sae_tui.jobs.words import gigabytes
from trainer.contract import memory
from trainer.contract.config import members, parse_job
from trainer.contract.job import JobConfig
from trainer.contract.memory import Memory
from trainer.contract.records import Job
from trainer.contract.source_knobs import DataShape
from trainer.contract.states import JobState

# What is measured is not quite what is estimated: PyTorch does not count the context, and the size of a process
# counts Python and PyTorch themselves.
COUNTED = {"cuda": "without the CUDA context", "cpu": "libraries included"}


class Measured(msgspec.Struct, frozen=True):
    """The most that a rank of a finished job took: reserved on a GPU ("cuda"), or held by a process ("cpu")."""

    job_id: int
    peak_bytes: int
    device: str

    def __str__(self) -> str:
        return f"measured {gigabytes(self.peak_bytes)} in job {self.job_id}, {COUNTED[self.device]}"


class Room(msgspec.Struct, frozen=True):
    """Free memory where a job is to run, of the fullest GPU or of the machine; None where it is unknown."""

    free_bytes: int | None = None
    where: str = ""


class Need(msgspec.Struct, frozen=True):
    """What each rank of a job takes. On the CPU, all `sharing` of them take it of the same memory."""

    parts: Memory
    sharing: int = 1
    measured: Measured | None = None
    remedies: tuple[str, ...] = ()
    # Whether it lacked memory when the remedies were looked for.
    judged_lacking: bool = False

    @property
    def rank_bytes(self) -> int:
        """The estimate, or what was measured on a GPU where that is more; the size of a process says too little."""
        if self.measured is None or self.measured.device != "cuda":
            return self.parts.total
        return max(self.parts.total, self.measured.peak_bytes + self.parts.context)

    @property
    def measured_bytes(self) -> int | None:
        return self.measured.peak_bytes if self.measured else None

    def lacks(self, room: Room) -> bool:
        """Whether there is less memory than the job takes, as far as that is known."""
        return room.free_bytes is not None and room.free_bytes < self.rank_bytes * self.sharing


def need(
    job: JobConfig,
    data: DataShape,
    ranks: int,
    room: Room,
    *,
    on_gpus: bool,
    device: str,
    past: Iterable[Job] = (),
    shared: JobConfig | None = None,
) -> Need:
    """What a job takes on so many ranks; `device` is where they run, the CPU also where GPUs are simulated.

    `shared` is the job with its mode settled, where that is known.
    """
    shared = shared or job
    parts = memory.estimate(shared, data.d_in, ranks, d_out=data.d_out, device="cuda" if on_gpus else "cpu")
    found = Need(parts, 1 if on_gpus else ranks, measured(job, data, ranks, device, past))
    if not found.lacks(room):
        return found
    free = room.free_bytes or 0
    # What is known of other settings are estimates: they say nothing where the estimate is what was wrong.
    misjudged = parts.total <= free
    remedies = memory.remedies(shared, data.d_in, ranks, free, data.d_out) if on_gpus and not misjudged else []
    return msgspec.structs.replace(found, remedies=tuple(remedies), judged_lacking=True)


def room_on_gpus(choices: Iterable[GpuChoice], gpus: Sequence[int]) -> Room:
    """Of the fullest of some GPUs; the one that does not tell its memory is left out."""
    known = [
        (choice.memory_free_bytes, f"GPU {choice.index}")
        for choice in choices
        if choice.index in gpus and choice.memory_free_bytes is not None
    ]
    return Room(*min(known)) if known else Room()


def room_on_cpu() -> Room:
    """What this machine could give to new processes without swapping."""
    import psutil

    return Room(psutil.virtual_memory().available, "this machine")


def measured(job: JobConfig, data: DataShape, ranks: int, device: str, past: Iterable[Job]) -> Measured | None:
    """The peak of the newest finished job of the same shape, from jobs that come newest first."""
    wanted = None
    for done in past:
        if done.state != JobState.FINISHED or done.peak_memory_bytes is None or done.d_in is None:
            continue
        if (done.device, done.world_size, done.d_in, done.d_out) != (device, ranks, data.d_in, data.d_out):
            continue
        wanted = wanted or _shape(job, data.d_in, data.d_out, ranks, device)
        if _recorded_shape(done.config, done.d_in, done.d_out, ranks, device) == wanted:
            return Measured(done.id, done.peak_memory_bytes, device)
    return None


def _shape(job: JobConfig, d_in: int, d_out: int | None, ranks: int, device: str) -> tuple[Any, ...]:
    """All that memory depends on: what the estimate counts, and what it may misjudge, each by its name."""
    saes = [
        (one.sae.architecture, one.sae.width(d_in), one.micro_batch(ranks), one.train.precision, one.train.optimizer)
        for one in members(job).values()
    ]
    return job.mode(ranks), job.parallel, saes, memory.estimate(job, d_in, ranks, d_out=d_out, device=device)


@functools.lru_cache(maxsize=512)
def _recorded_shape(config: str, d_in: int, d_out: int | None, ranks: int, device: str) -> tuple[Any, ...] | None:
    """Of a job file as it was stored; None where this version cannot read it."""
    try:
        job, _ = parse_job(tomllib.loads(config))
    except tomllib.TOMLDecodeError:
        return None
    return _shape(job, d_in, d_out, ranks, device) if job else None
