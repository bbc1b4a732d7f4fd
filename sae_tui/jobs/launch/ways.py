"""Forecasts a job on different numbers of GPUs, or on the CPU, and chooses the number that pays off."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from sae_tui.gpu.base import GpuSample
from trainer.contract.machine_memory import machine_memory
from trainer.contract.planning.check_job import MachineGpu, wanted_devices
from trainer.contract.planning.choose_mode import Settled
from trainer.contract.planning.forecast import COUNTS, UNKNOWN_MEMORY, DeviceMemory, Forecast, forecast, settle_on
from trainer.contract.planning.gpu_vendors import is_slice
from trainer.contract.planning.hardware import CPU, MeasuredHardware, slowest
from trainer.contract.planning.model_placement import ModelPlacement, place_model
from trainer.contract.planning.outlook import AnyOutlook
from trainer.contract.planning.workload import Workload, with_model_gpus
from trainer.contract.settings.catalog import OPTIMIZERS
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sources import DataShape
from trainer.contract.wording import duration, plural

# The minimum efficiency (speed-up per device) at which several devices are used; 1 is ideal.
LEAST_EFFICIENCY = 0.7
# More devices must save at least this much time, because several ranks take a few seconds longer to start than one.
LEAST_SAVED_S = 30.0
# The memory sizes of GPUs of the same model differ by less than this factor, because the driver and ECC reserve some
# memory.
SAME_SIZE = 0.9


class ForecastGpu(Protocol):
    """A GPU with its free and total memory in bytes, or None if not reported."""

    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def memory_free_bytes(self) -> int | None: ...
    @property
    def memory_total_bytes(self) -> int | None: ...


class Way(msgspec.Struct, frozen=True):
    """One way to run the job on `ranks` devices; `n_gpus` is 0 if the devices are CPU processes.

    `chosen` is True for the mode selected by the job's `parallel.mode`. `gpus` lists the GPUs with the most free
    memory; if there are fewer than `n_gpus`, it is empty and `fits` is None. `fits_now` is True if the devices are not
    in use and the job fits in their free memory. Speed-up and efficiency compare tokens per second with a single
    device's. `is_limited` is True if a smaller GPU limits the others.
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
    is_limited: bool = False

    @property
    def pays(self) -> bool:
        """Whether no device waits too long for the others, and no GPU limits larger ones."""
        return self.efficiency >= LEAST_EFFICIENCY and not self.is_limited


class Devices(msgspec.Struct, frozen=True):
    """A number of devices, assumed to be equally fast and to have as much memory as the smallest one."""

    name: str
    count: int
    gpus: tuple[int, ...] = ()
    capacity: DeviceMemory = UNKNOWN_MEMORY
    are_gpus: bool = False
    in_use: bool = False
    are_limited: bool = False

    @property
    def memory_of(self) -> str | None:
        return "" if self.are_gpus and self.name == CPU else None

    def has(self, n_bytes: int, room_bytes: int | None) -> bool | None:
        """Return whether `n_bytes` fit in `room_bytes`, or None if this is unknown or there are too few devices."""
        if room_bytes is None or (self.are_gpus and not self.gpus):
            return None
        return n_bytes <= room_bytes


def job_rows(
    job: JobConfig,
    data: DataShape,
    samples: Sequence[GpuSample],
    speeds: MeasuredHardware,
    price_per_gpu_hour: float | None = None,
    *,
    cuda: bool = True,
    busy: Collection[int] = (),
) -> tuple[Way, ...]:
    """Forecast the job on the usable GPUs (only the GPUs named in its file, if any), or on the CPU if there are none.

    `busy` contains the indices of GPUs in use, which are chosen last. Without `cuda`, the GPUs are simulated: they have
    memory, but are only as fast as the CPU processes that replace them. In the chosen mode, the language model gets
    separate GPUs if `data.model_gpus = "auto"` would assign them, even if the job sets a number. In the other modes,
    the language model shares the training GPUs.
    """
    gpus = sorted(gpus_for(job, samples), key=lambda gpu: gpu.index in busy)
    kinds = (
        [_gpus(gpus, count, cuda, busy) for count in _gpu_counts(job)]
        if gpus
        else [_processes(count) for count in _cpu_counts(job)]
    )
    rows = [row for devices in kinds for row in _rows(job, data, devices, speeds, price_per_gpu_hour)]
    return tuple(compared(rows))


def chosen_rows(
    job: JobConfig,
    data: DataShape,
    gpus: Sequence[ForecastGpu],
    speeds: MeasuredHardware,
    *,
    counts: Iterable[int],
    cuda: bool,
    busy: Collection[int],
) -> list[Way]:
    """Forecast the job in its own mode on the first 1, 2, … of these GPUs, for each number in `counts`."""
    kinds = [_gpus(gpus, count, cuda, busy) for count in counts]
    return list(compared([next(_rows(job, data, devices, speeds, None)) for devices in kinds]))


def row_of(look: AnyOutlook, gpus: Sequence[MachineGpu], seconds: float, *, fits: bool = True) -> Way:
    """Return the row for a job other than a training job, run on all of these GPUs."""
    is_free = not look.lack and not any(gpu.busy for gpu in gpus)
    return Way(
        n_gpus=len(gpus),
        ranks=len(gpus),
        mode=look.mode,
        latent_ranks=1,
        chosen=True,
        memory_bytes=look.needs_bytes or 0,
        seconds=seconds,
        tokens_per_s=1 / seconds,
        speed_up=1.0,
        efficiency=1.0,
        is_measured=False,
        gpus=tuple(sorted(gpu.index for gpu in gpus)),
        fits=fits,
        fits_now=fits and is_free,
    )


def compared(rows: Sequence[Way]) -> Iterator[Way]:
    """Yield the rows with their speed-up over the first row, which is for one device."""
    for row in rows:
        speed_up = row.tokens_per_s / rows[0].tokens_per_s
        yield msgspec.structs.replace(row, speed_up=speed_up, efficiency=speed_up / row.ranks)


def fewest(rows: Iterable[Way]) -> Way:
    """Return the row with the fewest devices that suffice."""
    return min(rows, key=_cost_of)


def _cost_of(row: Way) -> tuple[bool, bool, bool, int, bool, int]:
    """Return a sort key that prefers rows that fit, then efficient rows, then fewer devices and less memory."""
    return not row.fits_now, not row.fits, not row.pays, row.ranks, not row.chosen, row.memory_bytes


def larger(than: Way, rows: Iterable[Way]) -> list[Way]:
    """Return the rows in the job's own mode that fit now and have more devices than this row."""
    return [row for row in rows if row.chosen and row.fits_now and row.ranks > than.ranks]


def why_not_more(than: Way, rows: Iterable[Way]) -> str:
    """Return why more devices are not worth it, like `2 GPUs reach 1.1× the speed of one`, or "" if there are none."""
    others = larger(than, rows)
    if not others:
        return ""
    row = others[0]
    devices = plural(row.ranks, "GPU" if row.n_gpus else "CPU process")
    if row.is_limited:
        return f"{devices} would include a smaller GPU, which limits the others"
    if row.pays:
        return f"{devices} would save {duration(max(0.0, than.seconds - row.seconds))}"
    return f"{devices} reach {row.speed_up:.1f}× the speed of one"


def paying_more(than: Way, rows: Iterable[Way]) -> Way | None:
    """Return the row with the most devices that pays off compared with this row, or None if no row does."""
    paying = [row for row in larger(than, rows) if row.pays and than.seconds - row.seconds >= LEAST_SAVED_S]
    return max(paying, key=lambda row: row.ranks, default=None)


def gpus_for(job: JobConfig, samples: Sequence[GpuSample]) -> list[GpuSample]:
    """Return the GPUs the job may use, most free memory first, or an empty list if it requests the CPU.

    Slices are omitted if there are also whole GPUs. If there are only slices, one is returned, because a job can use
    only one.
    """
    named = job.launch.gpus
    if job.on_cpu:
        return []
    usable = [sample for sample in samples if sample.healthy and not sample.obstacle]
    allowed = [sample for sample in usable if isinstance(named, str) or sample.index in named]
    allowed.sort(key=lambda sample: (-(sample.memory_free_bytes or 0), sample.index))
    return [sample for sample in allowed if not is_slice(sample.uuid)] or allowed[:1]


def _gpus(samples: Sequence[ForecastGpu], count: int, cuda: bool, busy: Collection[int]) -> Devices:
    """Return the first `count` of these GPUs. If there are fewer, return `count` similar devices without indices."""
    taken = samples[:count]
    name = slowest(gpu.name for gpu in taken) if cuda else CPU
    gpus = tuple(sorted(gpu.index for gpu in taken)) if len(taken) == count else ()
    totals = [gpu.memory_total_bytes for gpu in taken if gpu.memory_total_bytes is not None]
    free = [gpu.memory_free_bytes for gpu in taken if gpu.memory_free_bytes is not None]
    capacity = DeviceMemory(min(free, default=None), min(totals, default=None))
    return Devices(
        name,
        count,
        gpus,
        capacity,
        are_gpus=True,
        in_use=any(index in busy for index in gpus),
        are_limited=bool(totals) and min(totals) < SAME_SIZE * max(totals),
    )


def _gpu_counts(job: JobConfig) -> list[int]:
    """Return the GPU counts to forecast: the usual counts, the job's own count, and the size of a hybrid group."""
    group = job.parallel.latent_ranks if job.parallel.mode == "hybrid" else 1
    return sorted({*COUNTS, wanted_devices(job), group})


def _cpu_counts(job: JobConfig) -> list[int]:
    """Return the process counts to forecast: one, one per core, and the number requested by the job."""
    asked = wanted_devices(job) if job.on_cpu else 1
    return sorted({1, len(os.sched_getaffinity(0)), asked})


def _processes(count: int) -> Devices:
    """Return `count` CPU processes, each with an equal share of the machine's memory."""
    memory = machine_memory()
    return Devices(CPU, count, (), DeviceMemory(memory.available_bytes // count, memory.total_bytes // count))


def _rows(
    job: JobConfig, data: DataShape, devices: Devices, speeds: MeasuredHardware, price: float | None
) -> Iterator[Way]:
    """Yield a row for the chosen mode, then one for every other mode at the same number of tokens per step."""
    colocated = with_model_gpus(job, devices.count, 0)
    chosen = _forecast(colocated, data, devices, speeds, price)
    placed = _placed(job, data, devices, speeds)
    if placed and placed.model_gpus:
        apart = _row(_as(chosen, placed.settled), devices, chosen=True)
        yield msgspec.structs.replace(apart, reason=placed.sentence, **_fits(devices, placed.needs_bytes))
    else:
        yield _row(chosen, devices, chosen=True)
    job, settled = colocated, chosen.settled.work
    work = Workload(job, devices.count, data, devices.name)
    same_step = work.with_settings("train", global_batch_size=settled.tokens_per_step)
    for mode in _modes(job, devices.count, data):
        if mode != settled.mode:
            as_mode = same_step.with_settings("parallel", mode=mode)
            other, _ = settle_on(as_mode, speeds, DeviceMemory(devices.capacity.total_bytes), devices.memory_of)
            yield _row(_as(chosen, other), devices, chosen=False)


def _placed(job: JobConfig, data: DataShape, devices: Devices, speeds: MeasuredHardware) -> ModelPlacement | None:
    """Return the automatic placement of the job's language model, or None if the job has no model to place."""
    if not devices.are_gpus or job.model_gpus == 0:
        return None
    settings = msgspec.structs.replace(job.data.settings, model_gpus="auto")
    left_open = job.replace("data", settings=settings)
    return place_model(left_open, data, devices.count, devices.name, speeds, devices.capacity, devices.memory_of)


def _forecast(
    job: JobConfig, data: DataShape, devices: Devices, speeds: MeasuredHardware, price: float | None
) -> Forecast:
    (result,) = forecast(
        Workload(job, devices.count, data, devices.name), speeds, counts=(devices.count,), capacity=devices.capacity,
        price_per_gpu_hour=price if devices.are_gpus else None, memory_of=devices.memory_of,
    )  # fmt: skip
    return result


def _as(chosen: Forecast, other: Settled) -> Forecast:
    """Return the forecast for the same number of steps in another mode."""
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
    """Return the modes in which `ranks` devices can run the job."""
    if ranks == 1:
        return ["single"]
    if not OPTIMIZERS[job.train.optimizer].elementwise or ranks > job.sae.width(data.d_in):
        return ["ddp"]
    sharing = job.parallel.latent_ranks
    return ["ddp", "tensor", *(["hybrid"] if sharing < ranks and ranks % sharing == 0 else [])]


def _row(expected: Forecast, devices: Devices, *, chosen: bool) -> Way:
    settled = expected.settled
    return Way(
        n_gpus=devices.count if devices.are_gpus else 0,
        ranks=devices.count,
        mode=settled.job.parallel.mode,
        latent_ranks=settled.work.latent_ranks,
        chosen=chosen,
        seconds=expected.seconds,
        tokens_per_s=expected.tokens_per_s,
        speed_up=expected.speed_up,
        efficiency=expected.efficiency,
        is_measured=expected.is_measured,
        cost=expected.cost,
        reason=settled.reason,
        gpus=devices.gpus,
        is_limited=devices.are_limited,
        room_bytes=devices.capacity.total_bytes if devices.gpus or not devices.are_gpus else None,
        **_fits(devices, settled.needs_bytes),
    )


def _fits(devices: Devices, needed: int) -> dict[str, Any]:
    """Return the memory requirement per device and whether it fits, as fields of a `Way`."""
    return {
        "memory_bytes": needed,
        "fits": devices.has(needed, devices.capacity.total_bytes),
        "fits_now": False if devices.in_use else devices.has(needed, devices.capacity.free_bytes),
    }
