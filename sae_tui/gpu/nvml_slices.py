"""Finds the slices (MIG instances) of split NVIDIA GPUs. Programs see each slice as a separate GPU."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

# The search has a time limit so that the other GPUs are shown even if one hangs in the driver.
_LIMIT_S = 2.0


class SliceLocation(NamedTuple):
    """A slice's location: NVML's index of the GPU, and the slice's number on that GPU.

    The numbers of a GPU's slices need not be consecutive.
    """

    gpu: int
    number: int

    def look_up(self, nvml: ModuleType) -> Any:
        """Return the slice's handle; raise NVML's error if the slice no longer exists."""
        return nvml.nvmlDeviceGetMigDeviceHandleByIndex(nvml.nvmlDeviceGetHandleByIndex(self.gpu), self.number)


def slices(nvml: ModuleType, n_gpus: int) -> list[SliceLocation]:
    """Return the slice locations on all GPUs that respond in time, in GPU order."""
    found: dict[int, list[SliceLocation]] = {}

    def ask(gpu: int) -> None:
        found[gpu] = places_of(nvml, gpu)

    threads = [threading.Thread(target=ask, args=(gpu,), daemon=True) for gpu in range(n_gpus)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + _LIMIT_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [place for gpu in range(n_gpus) for place in found.get(gpu, ())]


def places_of(nvml: ModuleType, gpu: int) -> list[SliceLocation]:
    """Return a GPU's slice locations; may block, like any driver call."""
    return list(_slices_of(nvml, gpu))


def _slices_of(nvml: ModuleType, gpu: int) -> Iterator[SliceLocation]:
    # GPUs and drivers without MIG support return an error, and older versions of pynvml lack these functions.
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        handle = nvml.nvmlDeviceGetHandleByIndex(gpu)
        is_split, _ = nvml.nvmlDeviceGetMigMode(handle)
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if is_split else 0):
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                yield SliceLocation(gpu, number)
