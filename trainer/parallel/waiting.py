"""Measures how long a rank waits for others, without making it wait for the measurement."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch


class Waits(Protocol):
    """The time that was spent in some transfers."""

    def seconds(self) -> float:
        """Return how long they took; wait until all of them are over."""


class Waiting(Protocol):
    """Sums the time spent inside `measure`."""

    def measure(self) -> contextlib.AbstractContextManager[None]: ...

    def take(self) -> Waits:
        """Return the waits since the last call, without waiting for those under way."""


class HostWaits(NamedTuple):
    """Waits that were over when they were taken."""

    total_s: float = 0.0

    def seconds(self) -> float:
        return self.total_s


class HostWaiting:
    """Measures transfers that the host waits for."""

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
    """Measures transfers that only the device waits for: by events around them, read once they have passed."""

    def __init__(self) -> None:
        self._since = CudaWaits()

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        # At every step, so that a long log interval does not pile up events.
        self._since.add(begin, end)

    def take(self) -> Waits:
        taken, self._since = self._since, CudaWaits()
        return taken


class CudaWaits:
    """Transfers of a GPU between pairs of events, of which the last may be under way."""

    def __init__(self) -> None:
        self._total_ms = 0.0
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def add(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Take in the next transfer, and add up those that are over."""
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
    """Return the measurement for this device."""
    return CudaWaiting() if device.type == "cuda" else HostWaiting()
