"""Reads the samples buffered by an NVIDIA driver: six per second for about the last 20 seconds."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

from sae_tui.gpu.ring import RingReading
from sae_tui.gpu.sensors import PERCENT, WATTS, is_possible

# NVML's sample types, each with the corresponding field of a reading, and the divisor and limits for its values.
_KINDS = ((0, "power_w", 1000.0, WATTS), (1, "utilization", 1.0, PERCENT))


def buffered(nvml: ModuleType, handle: Any) -> tuple[RingReading, ...]:
    """Return the mean reading of each buffered second, oldest first, or () if the driver does not report samples."""
    by_second: dict[int, dict[str, list[float]]] = {}
    for kind, field, divisor, limits in _KINDS:
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            value_type, samples = nvml.nvmlDeviceGetSamples(handle, kind, 0)
            for sample in samples:
                value = _value(nvml, value_type, sample.sampleValue) / divisor
                if is_possible(value, limits):
                    second = sample.timeStamp // 1_000_000
                    by_second.setdefault(second, {}).setdefault(field, []).append(value)
    return tuple(
        RingReading(float(second), **{field: sum(values) / len(values) for field, values in fields.items()})
        for second, fields in sorted(by_second.items())
    )


def _value(nvml: ModuleType, value_type: int, value: Any) -> float:
    """Return a sample's value from the union member for the value's type, or -1 if the type is unknown."""
    members = {
        nvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    }
    return float(getattr(value, members[value_type])) if value_type in members else -1.0
