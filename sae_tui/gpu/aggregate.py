"""Combines the current values and the history of all GPUs on a machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from sae_tui.gpu.base import GpuSample, GpuSummary
from sae_tui.gpu.past import RecentHistory, Slot
from sae_tui.gpu.period import Period
from sae_tui.gpu.sensors import Sensor

Number = TypeVar("Number", int, float)
HOTTEST_C = 100.0  # The top of the temperature axis.


@dataclass(frozen=True, slots=True)
class ContributingGpus:
    """The number of GPUs that contribute to each total."""

    memory: int = 0
    utilization: int = 0
    power: int = 0
    temperature: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate(GpuSummary):
    """Totals over the healthy GPUs.

    `gpu_count` includes unhealthy GPUs. `counted` contains the number of GPUs that contribute to each total.
    """

    gpu_count: int
    total_power_limit_w: Annotated[float | None, Sensor("Sum of the power limits", public="total_power_limit")] = None
    hottest: GpuSample | None = None
    counted: ContributingGpus = ContributingGpus()


def aggregate(samples: Sequence[GpuSample]) -> Aggregate:
    """Combine the samples of all healthy GPUs, ignoring the stale last values of unhealthy GPUs."""
    alive = [sample for sample in samples if sample.healthy]
    memory = _both((sample.memory_used_bytes, sample.memory_total_bytes) for sample in alive)
    busy = _not_none(sample.utilization for sample in alive if not sample.is_latched)
    powered = _both((sample.power_w, sample.power_limit_w) for sample in alive)
    drawn = [used for used, _ in powered] or _not_none(sample.power_w for sample in alive)
    warm = [sample for sample in alive if sample.temperature_c is not None]
    hottest = max(warm, key=lambda sample: sample.temperature_c or 0, default=None)
    return Aggregate(
        gpu_count=len(samples),
        total_memory_used_bytes=sum(used for used, _ in memory) if memory else None,
        total_memory_total_bytes=sum(total for _, total in memory) if memory else None,
        average_utilization=sum(busy) / len(busy) if busy else None,
        total_power_w=sum(drawn) if drawn else None,
        total_power_limit_w=sum(limit for _, limit in powered) if powered else None,
        max_temperature_c=hottest.temperature_c if hottest else None,
        hottest=hottest,
        counted=ContributingGpus(len(memory), len(busy), len(drawn), len(warm)),
    )


@dataclass(frozen=True, slots=True)
class CapacityShares:
    """The share (0 to 1) of the GPUs' total capacity in use in each interval.

    For each interval, only the GPUs that reported the value are included. A share is None if no GPU reported the value,
    or if a GPU has no reading in the interval.
    """

    memory: Sequence[float | None]
    utilization: Sequence[float | None]
    power: Sequence[float | None]
    temperature: Sequence[float | None]


def shares(past: RecentHistory) -> CapacityShares:
    """Return the share of the GPUs' total capacity in use in each interval of a history."""
    limits_w = [past.power_limits_w[index] for index in past.slots]
    rows = [_shares(slots, limits_w) for slots in zip(*past.slots.values(), strict=True)]
    quantities = zip(*rows, strict=True) if rows else ((),) * 4
    return CapacityShares(*map(Period if past.is_period else tuple, quantities))


def _shares(slots: Sequence[Slot], limits_w: Sequence[float | None]) -> tuple[float | None, ...]:
    read = [slot for slot in slots if slot is not None]
    if len(read) < len(slots):
        return (None, None, None, None)
    memory = _both((reading.memory_used_bytes, reading.memory_total_bytes) for reading in read)
    busy = _not_none(reading.utilization for reading in read)
    power = _both((reading.power_w, limit) for reading, limit in zip(read, limits_w, strict=True))
    heat = max(_not_none(reading.temperature_c for reading in read), default=None)
    return (
        _share(memory),
        sum(busy) / len(busy) / 100 if busy else None,
        _share(power),
        None if heat is None else heat / HOTTEST_C,
    )


def _share(pairs: Sequence[tuple[float, float]]) -> float | None:
    whole = sum(total for _, total in pairs)
    return sum(used for used, _ in pairs) / whole if whole else None


def _not_none(values: Iterable[Number | None]) -> list[Number]:
    return [value for value in values if value is not None]


def _both(pairs: Iterable[tuple[Number | None, Number | None]]) -> list[tuple[Number, Number]]:
    """Return only the pairs in which neither value is None."""
    return [(one, other) for one, other in pairs if one is not None and other is not None]
