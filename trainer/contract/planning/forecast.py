"""Predicts a job's time, cost and memory on 1, 2, 4 and 8 devices before the job runs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from trainer.contract.planning.choose_mode import PlannedResources, Settled, settle
from trainer.contract.planning.hardware import MeasuredHardware
from trainer.contract.planning.step_time import run_seconds
from trainer.contract.planning.workload import Workload

COUNTS = (1, 2, 4, 8)


class DeviceMemory(msgspec.Struct, frozen=True):
    """The free and total memory per rank on the device with the least memory; None if unknown."""

    free_bytes: int | None = None
    total_bytes: int | None = None


UNKNOWN_MEMORY = DeviceMemory()


class Forecast(msgspec.Struct, frozen=True):
    """The predicted time and cost of a job on `ranks` equal devices; `speed_up` is relative to one device."""

    ranks: int
    settled: Settled
    tokens_per_s: float
    seconds: float
    speed_up: float
    is_measured: bool
    cost: float | None = None

    @property
    def efficiency(self) -> float:
        """The `speed_up` per device; 1.0 means that no device ever waits."""
        return self.speed_up / self.ranks


def forecast(
    work: Workload,
    box: MeasuredHardware,
    *,
    counts: Iterable[int] = COUNTS,
    capacity: DeviceMemory = UNKNOWN_MEMORY,
    price_per_gpu_hour: float | None = None,
    memory_of: str | None = None,
) -> list[Forecast]:
    """Return a forecast for each number of devices in `counts`.

    A step has `batch_size` tokens per device, unless the job sets `global_batch_size`.
    """
    rows: list[Forecast] = []
    alone = 0.0
    for ranks in sorted({1, *counts}):
        settled, is_measured = settle_on(work.on(ranks), box, capacity, memory_of)
        rate = settled.work.tokens_per_step / settled.time.total_s
        alone = alone or rate
        seconds = run_seconds(settled.work, settled.time)
        cost = None if price_per_gpu_hour is None else ranks * seconds / 3600 * price_per_gpu_hour
        rows.append(Forecast(ranks, settled, rate, seconds, rate / alone, is_measured, cost))
    return [row for row in rows if row.ranks in tuple(counts)]


def settle_on(
    work: Workload, box: MeasuredHardware, capacity: DeviceMemory = UNKNOWN_MEMORY, memory_of: str | None = None
) -> tuple[Settled, bool]:
    """Resolve `auto` on the workload's devices; return the result and whether their speeds were measured.

    The job is planned to fit into the free memory or, if that is impossible, into the total memory. `memory_of` is the
    device whose memory is estimated, if it differs from the ranks' device.
    """
    speeds = box.speeds(work.device_name, work.precision, work.ranks, work.nodes)
    asked = work.job.parallel.mode
    # On one device, the mode is always `single`; a requested mode applies only to several devices.
    mode = "single" if work.ranks == 1 else "auto" if asked == "single" or not can_share(work) else asked
    room_bytes = capacity.total_bytes if capacity.free_bytes is None else capacity.free_bytes
    work, place = work.with_settings("parallel", mode=mode), PlannedResources(speeds, room_bytes, memory_of)
    settled = settle(work, place)
    if not settled.fits and capacity.total_bytes is not None:
        settled = settle(work, msgspec.structs.replace(place, free_bytes=capacity.total_bytes))
    return settled, speeds.is_measured


def can_share(work: Workload) -> bool:
    """Return whether the workload's ranks can share the work in the requested mode."""
    if work.mode == "sweep":
        return work.ranks <= len(work.members)
    return work.ranks % work.latent_ranks == 0 and work.latent_ranks <= work.narrowest
