"""Measures how long a rank waits for other ranks, without blocking the rank."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch


class Waits(Protocol):
    """The time taken by a set of transfers."""

    def seconds(self) -> float:
        """Wait until all transfers are complete, and return their total time."""


class Waiting(Protocol):
    """Measures the total time spent in `with measure()` blocks."""

    def measure(self) -> contextlib.AbstractContextManager[None]: ...

    def take(self) -> Waits:
        """Return the time measured since the last call, without blocking, even if some transfers are still running."""


class HostWaits(NamedTuple):
    """The time spent in completed transfers."""

    total_s: float = 0.0

    def seconds(self) -> float:
        return self.total_s


class HostWaiting:
    """Measures transfers that block the host."""

    def __init__(self) -> None:
        self._total_s = 0.0

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._total_s += time.perf_counter() - begin

    def take(self) -> Waits:
        total_s, self._total_s = self._total_s, 0.0
        return HostWaits(total_s)


class CudaWaiting:
    """Measures transfers that block only the device, using CUDA events that are read once they are complete."""

    def __init__(self) -> None:
        self._since = CudaWaits()

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        # Process completed events at every step, so that they do not accumulate over a long log interval.
        self._since.add(begin, end)

    def take(self) -> Waits:
        taken, self._since = self._since, CudaWaits()
        return taken


class CudaWaits:
    """GPU transfers, each timed with two events; the latest transfers may still be running."""

    def __init__(self) -> None:
        self._total_ms = 0.0
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def add(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Add a transfer, and add the times of completed transfers to the total."""
        self._under_way.append((begin, end))
        while self._under_way and self._under_way[0][1].query():
            self._add_up_first()

    def seconds(self) -> float:
        while self._under_way:
            self._under_way[0][1].synchronize()
            self._add_up_first()
        return self._total_ms / 1000

    def _add_up_first(self) -> None:
        begin, end = self._under_way.popleft()
        self._total_ms += begin.elapsed_time(end)


def waiting(device: torch.device) -> Waiting:
    """Return the `Waiting` implementation for a device."""
    return CudaWaiting() if device.type == "cuda" else HostWaiting()
