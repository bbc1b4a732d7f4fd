"""Reads results and durations of queued GPU work, and orders this work, without letting the queue run empty."""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor's values for the host; on a GPU, the copy is queued behind all previously queued work."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            # Clone the tensor, because it may be overwritten later.
            self._values = tensor.clone()
        else:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            # The copy runs on the tensor's GPU, which may differ from this thread's current device.
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Tensor:
        """Wait until the values are copied, and return them on the CPU."""
        if self._copied:
            self._copied.synchronize()
        return self._values.cpu()


class Moment(Protocol):
    """A point in a device's queue of work, for ordering other devices' work without making the host wait."""

    def hold(self, device: torch.device) -> None:
        """Make all work that this thread queues on `device` from now on wait for this point."""


class CompletedWork:
    """A point in CPU work; such work is complete as soon as a call returns."""

    def hold(self, device: torch.device) -> None:
        pass


class CudaMoment:
    """The end of the work that this thread has already queued on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def hold(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).wait_event(self._event)


def moment(device: torch.device) -> Moment:
    """Return the end of the work that this thread has already queued on a device."""
    return CudaMoment(device) if device.type == "cuda" else CompletedWork()


def queued_copy(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of host values on a device; on a GPU, the copy is queued without making the host wait."""
    if device.type == "cuda" and values.device.type == "cpu":
        # A copy from pageable memory would make the host wait until all previously queued work is complete.
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class Stopwatch(Protocol):
    """Measures the duration of a device's work from the stopwatch's creation to `stop`."""

    def stop(self) -> None:
        """Stop the measurement at the end of all work queued before this call."""

    def seconds(self) -> float:
        """Wait until the work is complete, and return the measured time."""


class HostStopwatch:
    """Measures CPU work; such work is complete as soon as a call returns."""

    def __init__(self) -> None:
        self._began = self._ended = time.perf_counter()

    def stop(self) -> None:
        self._ended = time.perf_counter()

    def seconds(self) -> float:
        return self._ended - self._began


class CudaStopwatch:
    """Measures GPU work between two CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._queue = torch.cuda.current_stream(device)
        self._began.record(self._queue)

    def stop(self) -> None:
        self._ended.record(self._queue)

    def seconds(self) -> float:
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1000


def stopwatch(device: torch.device) -> Stopwatch:
    """Start a stopwatch for a device's work."""
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()
