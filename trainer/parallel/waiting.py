"""Measures how long a rank waits for others, without making it wait for the measurement."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch


class Waiting(Protocol):
    """Sums the time spent inside `measured`."""

    def measure(self) -> contextlib.AbstractContextManager[None]: ...

    def take_s(self) -> float:
        """Return the seconds since the last call, and start again from 0."""


class HostWaiting:
    """Measures transfers that the host waits for."""

    def __init__(self) -> None:
        self._total_s = 0.0

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._total_s += time.perf_counter() - begin

    def take_s(self) -> float:
        total_s, self._total_s = self._total_s, 0.0
        return total_s


class CudaWaiting:
    """Measures transfers that only the device waits for: by events around them, read once they have passed.

    After a synchronisation `take_s` counts all of them; otherwise it leaves those under way to the next call.
    """

    def __init__(self) -> None:
        self._total_ms = 0.0
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._under_way.append((begin, end))
        # At every step, so that a long log interval does not pile up events.
        self._collect()

    def take_s(self) -> float:
        self._collect()
        total_ms, self._total_ms = self._total_ms, 0.0
        return total_ms / 1000

    def _collect(self) -> None:
        while self._under_way and self._under_way[0][1].query():
            begin, end = self._under_way.popleft()
            self._total_ms += begin.elapsed_time(end)


def waiting(device: torch.device) -> Waiting:
    """Return the measurement for this device."""
    return CudaWaiting() if device.type == "cuda" else HostWaiting()
