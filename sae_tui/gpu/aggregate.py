"""All GPUs of a machine as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sae_tui.gpu.base import GpuSample

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Sums and means over the healthy cards; None where none of them has the sensor. `gpu_count` counts all."""

    gpu_count: int
    total_memory_used_bytes: int | None
    total_memory_total_bytes: int | None
    average_utilization: float | None
    total_power_w: float | None
    total_power_limit_w: float | None
    hottest: GpuSample | None


def aggregate(samples: Sequence[GpuSample]) -> Aggregate:
    """What a card that cannot be read said last is left out: it would be summed for ever."""
    alive = [sample for sample in samples if sample.healthy]
    busy = _known(sample.utilization for sample in alive)
    return Aggregate(
        gpu_count=len(samples),
        total_memory_used_bytes=_total(sample.memory_used_bytes for sample in alive),
        total_memory_total_bytes=_total(sample.memory_total_bytes for sample in alive),
        average_utilization=sum(busy) / len(busy) if busy else None,
        total_power_w=_total(sample.power_w for sample in alive),
        total_power_limit_w=_total(sample.power_limit_w for sample in alive),
        hottest=max(
            (sample for sample in alive if sample.temperature_c is not None),
            key=lambda sample: sample.temperature_c or 0,
            default=None,
        ),
    )


def _known(values: Iterable[Number | None]) -> list[Number]:
    return [value for value in values if value is not None]


def _total(values: Iterable[Number | None]) -> Number | None:
    known = _known(values)
    return sum(known) if known else None
