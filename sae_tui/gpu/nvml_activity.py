"""What the multiprocessors of an NVIDIA card really do, which its utilisation does not tell: NVML's GPM, Hopper and on.

Utilisation is the share of time in which any kernel ran, be it on one multiprocessor of 132.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_VERSION = 1
# NVML's numbers of what it counts, in the order of `Activity`.
_METRICS = (2, 3, 5)


@dataclass(frozen=True, slots=True)
class Activity:
    """Percent of the multiprocessors that were busy, of the warps they can hold, and of the time in which tensor cores
    worked; None where that is not known."""

    sm: float | None = None
    occupancy: float | None = None
    tensor: float | None = None


class ActivityReader:
    """Counts from one reading to the next; a card that cannot is asked only once."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml
        self._samples: list[Any] | None = None

    def read(self, handle: Any) -> Activity:
        """Return what was done since the last reading; nothing at the first one, and where a card does not tell."""
        with contextlib.suppress(self._nvml.NVMLError, AttributeError):
            if self._samples is None:
                self._samples = []
                if self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                    self._samples = [self._nvml.nvmlGpmSampleAlloc() for _ in range(2)]
                    self._nvml.nvmlGpmSampleGet(handle, self._samples[1])
            elif self._samples:
                # The older of the two is written anew.
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
