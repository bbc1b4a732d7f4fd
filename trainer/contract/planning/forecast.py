"""How long a job takes on 1, 2, 4 and 8 devices, what that costs, and whether it fits: before anything runs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from trainer.contract.planning.choose_mode import Place, Settled, settle
from trainer.contract.planning.hardware import CPU, Box
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members
from trainer.contract.settings.sources import DataShape

COUNTS = (1, 2, 4, 8)


class Room(msgspec.Struct, frozen=True):
    """Memory for a rank, free now and in all, of the device that has least of it; None where it is unknown."""

    free_bytes: int | None = None
    total_bytes: int | None = None


NO_ROOM = Room()


class Forecast(msgspec.Struct, frozen=True):
    """A job on `ranks` devices of one kind; `speed_up` is its tokens per second divided by those of one device."""

    ranks: int
    settled: Settled
    tokens_per_s: float
    seconds: float
    speed_up: float
    is_measured: bool
    cost: float | None = None

    @property
    def efficiency(self) -> float:
        """`speed_up` per device: 1.0 if no device ever waited."""
        return self.speed_up / self.ranks


def forecast(
    job: JobConfig,
    shape: DataShape,
    box: Box,
    device_name: str,
    *,
    counts: Iterable[int] = COUNTS,
    room: Room = NO_ROOM,
    price_per_gpu_hour: float | None = None,
    memory_of: str | None = None,
) -> list[Forecast]:
    """Return a row for each number of devices called `device_name`.

    A step has `batch_size` tokens for each device, unless the job fixes `global_batch_size`.
    """
    rows: list[Forecast] = []
    alone = 0.0
    for ranks in sorted({1, *counts}):
        settled, is_measured = settled_on(job, shape, box, device_name, ranks, room, memory_of)
        whole = settled.job.effective_batch(ranks)
        rate = whole / settled.time.total_s
        alone = alone or rate
        seconds = settled.job.total_steps(ranks) * settled.time.total_s
        cost = None if price_per_gpu_hour is None else ranks * seconds / 3600 * price_per_gpu_hour
        rows.append(Forecast(ranks, settled, rate, seconds, rate / alone, is_measured, cost))
    return [row for row in rows if row.ranks in tuple(counts)]


def settled_on(
    job: JobConfig,
    shape: DataShape,
    box: Box,
    device_name: str,
    ranks: int,
    room: Room = NO_ROOM,
    memory_of: str | None = None,
) -> tuple[Settled, bool]:
    """Resolve `auto` on `ranks` devices of this name; return the settled job and whether the speeds were measured.

    It has to fit into the memory that is free now; where nothing does, into all that the devices have.
    """
    speeds = box.speeds(device_name, precision_on(job, device_name), ranks)
    device = "cpu" if device_name == CPU else "cuda"
    asked = job.parallel.mode
    # On one device every mode is `single`; a mode that was asked for holds where there are several.
    mode = "single" if ranks == 1 else "auto" if asked == "single" or not _can(job, shape, asked, ranks) else asked
    room_bytes = room.total_bytes if room.free_bytes is None else room.free_bytes
    job, place = job.replace("parallel", mode=mode), Place(ranks, speeds, device, room_bytes, memory_of)
    settled = settle(job, shape, place)
    if not settled.fits and room.total_bytes is not None:
        settled = settle(job, shape, msgspec.structs.replace(place, free_bytes=room.total_bytes))
    return settled, speeds.is_measured


def _can(job: JobConfig, shape: DataShape, mode: str, ranks: int) -> bool:
    if mode == "sweep":
        return ranks <= len(members(job))
    sharing = job.replace("parallel", mode=mode).latent_ranks(ranks)
    return ranks % sharing == 0 and all(sharing <= sae.sae.width(shape.d_in) for sae in members(job).values())


def precision_on(job: JobConfig, device_name: str) -> str:
    """Return the job's precision; "auto" is fp32 on a CPU, tf32 on old cards without fast bf16, bf16 on all others."""
    if job.train.precision != "auto":
        return job.train.precision
    if device_name == CPU:
        return "fp32"
    return "tf32" if any(old in device_name for old in ("V100", "T4", "P100", "GTX")) else "bf16"
