"""Measures how busy the multiprocessors of an NVIDIA GPU are, through NVML's GPM (Hopper and later).

Utilisation does not show this: it is the share of time in which any kernel ran, even on a single multiprocessor of 132.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_VERSION = 1
# NVML's metric numbers, in the order of `Activity`.
_METRICS = (2, 3, 5)


@dataclass(frozen=True, slots=True)
class Activity:
    """Percentages of busy multiprocessors, of the maximum number of warps, and of the time with busy tensor cores.

    A value is None if it is unknown.
    """

    sm: float | None = None
    occupancy: float | None = None
    tensor: float | None = None


class ActivityReader:
    """Measures the activity between two reads; a GPU that does not support this is queried only once."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml
        self._samples: list[Any] | None = None

    def read(self, handle: Any) -> Activity:
        """Return the activity since the last read; it is empty at the first read and on GPUs without support."""
        with contextlib.suppress(self._nvml.NVMLError, AttributeError):
            if self._samples is None:
                self._samples = []
                if self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                    self._samples = [self._nvml.nvmlGpmSampleAlloc() for _ in range(2)]
                    self._nvml.nvmlGpmSampleGet(handle, self._samples[1])
            elif self._samples:
                # Overwrite the older sample.
                self._samples.reverse()
                self._nvml.nvmlGpmSampleGet(handle, self._samples[1])
                return self._between(*self._samples)
        return Activity()

    def _between(self, first: Any, second: Any) -> Activity:
        asked = self._nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics, asked.sample1, asked.sample2 = _VERSION, len(_METRICS), first, second
        for place, metric in enumerate(_METRICS):
            asked.metrics[place].metricId = metric
        self._nvml.nvmlGpmMetricsGet(asked)
        answers = asked.metrics[: len(_METRICS)]
        return Activity(*(None if one.nvmlReturn else one.value for one in answers))
