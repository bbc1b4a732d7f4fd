"""What the host learns of the work it has queued on a GPU, without making the queue run dry."""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor


class HostCopy:
    """A tensor's values for the host; a GPU copies them once it has done all that was queued before."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            # What is written to the tensor later is not meant.
            self._values = tensor.clone()
        else:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            # The copy is in the queue of the tensor's GPU, which need not be the current one of this thread.
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Tensor:
        """Return the values on the CPU; wait until they are there."""
        if self._copied:
            self._copied.synchronize()
        return self._values.cpu()


class Moment(Protocol):
    """A moment in a device's work, by which the work of others is ordered while no host waits."""

    def hold(self, device: torch.device) -> None:
        """Let whatever this thread queues on `device` from here on wait until the moment has passed."""


class Past:
    """A moment in work that is done when it returns."""

    def hold(self, device: torch.device) -> None:
        pass


class CudaMoment:
    """The end of what this thread has queued on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def hold(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).wait_event(self._event)


def moment(device: torch.device) -> Moment:
    """Return the moment at which this device has done all that this thread has queued."""
    return CudaMoment(device) if device.type == "cuda" else Past()


def queued_copy(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the host on a device; a GPU gets them once it is there, and nobody waits for that."""
    if device.type == "cuda" and values.device.type == "cpu":
        # From other memory a copy begins only when all that was queued before is done, and the host waits for it.
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class Stopwatch(Protocol):
    """Measures a stretch of a device's work from where it was made on."""

    def stop(self) -> None:
        """End the stretch here."""

    def seconds(self) -> float:
        """Return how long it took; wait until it is over."""


class HostStopwatch:
    """Measures work that is done when it returns."""

    def __init__(self) -> None:
        self._began = self._ended = time.perf_counter()

    def stop(self) -> None:
        self._ended = time.perf_counter()

    def seconds(self) -> float:
        return self._ended - self._began


class CudaStopwatch:
    """Measures by a GPU's own clock, between what is queued before and after."""

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
    """Start to measure what this device does."""
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()
