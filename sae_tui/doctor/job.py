"""What a job takes on 1, 2, 4 and 8 GPUs in every mode, or on the CPU: memory, time, and what that costs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from sae_tui.gpu.base import GpuSample
from trainer.contract.planning.check_job import wanted_ranks
from trainer.contract.planning.choose_mode import Settled
from trainer.contract.planning.forecast import COUNTS, NO_ROOM, Forecast, Room, forecast, settled_on
from trainer.contract.planning.hardware import CPU, Box, slowest
from trainer.contract.settings.catalog import OPTIMIZERS
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sources import DataShape


class JobRow(msgspec.Struct, frozen=True):
    """One way to run the job on `ranks` devices; `n_gpus` is 0 where they are CPU processes.

    `chosen` is the mode that `parallel.mode` of the job comes to. `gpus` are the roomiest so many, empty where there
    are fewer; `fits` is None then. `fits_now` is whether nobody uses those devices and the job fits into what is free.
    Speed-up and efficiency are in tokens per second, against one device.
    """

    n_gpus: int
    ranks: int
    mode: str
    latent_ranks: int
    chosen: bool
    memory_bytes: int
    seconds: float
    tokens_per_s: float
    speed_up: float
    efficiency: float
    is_measured: bool
    cost: float | None = None
    reason: str = ""
    gpus: tuple[int, ...] = ()
    room_bytes: int | None = None
    fits: bool | None = None
    fits_now: bool | None = None


class Devices(msgspec.Struct, frozen=True):
    """So many of one speed, with the least memory that one of them has."""

    name: str
    count: int
    gpus: tuple[int, ...] = ()
    room: Room = NO_ROOM
    are_cards: bool = False
    in_use: bool = False

    @property
    def memory_of(self) -> str:
        return "cuda" if self.are_cards else "cpu"

    def has(self, n_bytes: int, room_bytes: int | None) -> bool | None:
        """Whether so many fit into the room there is; None where there are not as many devices."""
        if room_bytes is None or (self.are_cards and not self.gpus):
            return None
        return n_bytes <= room_bytes


def job_rows(
    job: JobConfig,
    data: DataShape,
    samples: Sequence[GpuSample],
    speeds: Box,
    price_per_gpu_hour: float | None = None,
    *,
    cuda: bool = True,
    busy: Collection[int] = (),
) -> tuple[JobRow, ...]:
    """On the GPUs that can be read, of which the job file may name some; on the CPU where there are none.

    `busy` are the indices of those that somebody uses, which are taken last. Without `cuda` the GPUs are simulated:
    they have memory, and are as fast as the processes that stand in for them.
    """
    cards = sorted(cards_for(job, samples), key=lambda card: card.index in busy)
    kinds = (
        [_cards(cards, count, cuda, busy) for count in COUNTS]
        if cards
        else [_processes(count) for count in _cpu_counts(job)]
    )
    return tuple(row for devices in kinds for row in _rows(job, data, devices, speeds, price_per_gpu_hour))


def cards_for(job: JobConfig, samples: Sequence[GpuSample]) -> list[GpuSample]:
    """Those the job may have, the one with most free memory first; none for the CPU."""
    named = job.launch.gpus
    if isinstance(named, str) and named.startswith("cpu"):
        return []
    kept = [sample for sample in samples if sample.healthy and (isinstance(named, str) or sample.index in named)]
    return sorted(kept, key=lambda sample: (-(sample.memory_free_bytes or 0), sample.index))


def _cards(cards: Sequence[GpuSample], count: int, cuda: bool, busy: Collection[int]) -> Devices:
    """The roomiest; where there are fewer, as many as are asked for of the same kind."""
    taken = cards[:count]
    name = slowest(card.name for card in taken) if cuda else CPU
    gpus = tuple(sorted(card.index for card in taken)) if len(taken) == count else ()
    totals = [card.memory_total_bytes for card in taken if card.memory_total_bytes is not None]
    free = [card.memory_free_bytes for card in taken if card.memory_free_bytes is not None]
    room = Room(min(free, default=None), min(totals, default=None))
    return Devices(name, count, gpus, room, are_cards=True, in_use=any(index in busy for index in gpus))


def _cpu_counts(job: JobConfig) -> list[int]:
    """One process and one for each core, and what the job asks for."""
    asked = wanted_ranks(job) if str(job.launch.gpus).startswith("cpu") else 1
    return sorted({1, len(os.sched_getaffinity(0)), asked})


def _processes(count: int) -> Devices:
    """Each has its share of the memory."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    known = {name.rstrip(":"): 1024 * int(value) for name, value, *_ in lines}
    return Devices(CPU, count, (), Room(known["MemAvailable"] // count, known["MemTotal"] // count))


def _rows(job: JobConfig, data: DataShape, devices: Devices, speeds: Box, price: float | None) -> Iterator[JobRow]:
    """First what the job comes to, then every other mode with as many tokens in a step."""
    chosen = _forecast(job, data, devices, speeds, price)
    yield _row(chosen, devices, chosen=True)
    settled = chosen.settled.job
    same_step = job.replace("train", global_batch_size=settled.effective_batch(devices.count))
    for mode in _modes(job, devices.count, data):
        if mode != settled.parallel.mode:
            as_mode = same_step.replace("parallel", mode=mode)
            room = Room(devices.room.total_bytes)
            other, _ = settled_on(as_mode, data, speeds, devices.name, devices.count, room, devices.memory_of)
            yield _row(_as(chosen, other), devices, chosen=False)


def _forecast(job: JobConfig, data: DataShape, devices: Devices, speeds: Box, price: float | None) -> Forecast:
    (found,) = forecast(
        job, data, speeds, devices.name, counts=(devices.count,), room=devices.room,
        price_per_gpu_hour=price if devices.are_cards else None, memory_of=devices.memory_of,
    )  # fmt: skip
    return found


def _as(chosen: Forecast, other: Settled) -> Forecast:
    """The same steps in another mode."""
    slower = other.time.total_s / chosen.settled.time.total_s
    return msgspec.structs.replace(
        chosen,
        settled=other,
        tokens_per_s=chosen.tokens_per_s / slower,
        seconds=chosen.seconds * slower,
        speed_up=chosen.speed_up / slower,
        cost=None if chosen.cost is None else chosen.cost * slower,
    )


def _modes(job: JobConfig, ranks: int, data: DataShape) -> list[str]:
    """In which so many devices can share the job."""
    if ranks == 1:
        return ["single"]
    if not OPTIMIZERS[job.train.optimizer].steps_alone or ranks > job.sae.width(data.d_in):
        return ["ddp"]
    sharing = job.parallel.latent_ranks
    return ["ddp", "tensor", *(["hybrid"] if sharing < ranks and ranks % sharing == 0 else [])]


def _row(found: Forecast, devices: Devices, *, chosen: bool) -> JobRow:
    settled, needed = found.settled, found.settled.needs_bytes
    return JobRow(
        n_gpus=devices.count if devices.are_cards else 0,
        ranks=devices.count,
        mode=settled.job.parallel.mode,
        latent_ranks=settled.job.latent_ranks(devices.count),
        chosen=chosen,
        memory_bytes=needed,
        seconds=found.seconds,
        tokens_per_s=found.tokens_per_s,
        speed_up=found.speed_up,
        efficiency=found.efficiency,
        is_measured=found.is_measured,
        cost=found.cost,
        reason=settled.reason,
        gpus=devices.gpus,
        room_bytes=devices.room.total_bytes if devices.gpus or not devices.are_cards else None,
        fits=devices.has(needed, devices.room.total_bytes),
        fits_now=False if devices.in_use else devices.has(needed, devices.room.free_bytes),
    )
