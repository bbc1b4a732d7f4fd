"""Brings batches to the device that trains on them, while it takes the step before."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.activations.base import Empty, Pair, empty_rows, to_device

# Batches whose training the host may have queued before the GPU has begun with the first of them.
AHEAD = 2


class Event(Protocol):
    """A point in what a device does."""

    def synchronize(self) -> None:
        """Have the host wait until the device has passed it."""


class Sent(NamedTuple):
    """A batch on its way; on a GPU it is there once the device has passed `arrival`."""

    pair: Pair
    arrival: Event | None = None


class Transfer:
    """Where one thread does the work of a device: rows are read into new memory, and moved by the one that trains."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> Empty:
        """Return what gives memory to read the next batch into; called by the thread that reads, as `send` is."""
        return empty_rows

    def send(self, pair: Pair) -> Sent:
        """Start to move inputs and targets to the device."""
        return Sent(pair)

    def receive(self, sent: Sent) -> Pair:
        """Return a batch on the device, one tensor where there was one; called by the thread that trains."""
        return to_device(sent.pair, self._device)


class Lane(Protocol):
    """A queue of copies from the host beside the one that trains; see `CudaLane`."""

    def pinned(self, n_bytes: int) -> Tensor:
        """Return memory that can be copied while the host goes on, uint8 [n_bytes]."""

    def copy(self, rows: Tensor) -> Tensor:
        """Return a copy on the device, which is made after the ones before."""

    def mark(self) -> Event:
        """Return the point after the last copy."""

    def meet(self, arrival: Event, rows: tuple[Tensor, ...]) -> None:
        """Have the training wait for `arrival`, and keep the copies' memory until it has used it."""


class CudaLane:
    """A stream of its own.

    A batch's memory is free once the GPU has trained on it, not once the host has queued that. So the host waits where
    it is more than two batches ahead: else it would have memory made for each.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._met: deque[torch.cuda.Event] = deque()

    def pinned(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, rows: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream):
            return rows.to(self._device, non_blocking=True)

    def mark(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def meet(self, arrival: Any, rows: tuple[Tensor, ...]) -> None:
        training = torch.cuda.current_stream(self._device)
        if len(self._met) == AHEAD:
            self._met.popleft().synchronize()
        self._met.append(training.record_event())
        training.wait_event(arrival)
        for one in rows:
            one.record_stream(training)


class Overlapped(Transfer):
    """Rows are read into pinned memory, and copied to a GPU by a lane beside its training.

    Of two places in pinned memory one is read into while the other is copied; before it is written again, its copy has
    been made.
    """

    def __init__(self, device: torch.device, lane: Lane) -> None:
        super().__init__(device)
        self._lane = lane
        self._places = itertools.cycle([_Place(lane), _Place(lane)])
        self._place = next(self._places)

    def begin(self) -> Empty:
        self._place = next(self._places)
        self._place.clear()
        return self._place.empty

    def send(self, pair: Pair) -> Sent:
        x, y = pair
        inputs = self._lane.copy(self._place.holding(x))
        targets = inputs if y is x else self._lane.copy(self._place.holding(y))
        self._place.copied = self._lane.mark()
        return Sent((inputs, targets), self._place.copied)

    def receive(self, sent: Sent) -> Pair:
        assert sent.arrival is not None
        x, y = sent.pair
        self._lane.meet(sent.arrival, (x,) if y is x else (x, y))
        return sent.pair


class _Place:
    """Pinned memory for the rows of one batch, as much as the largest needed."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._memory: list[Tensor] = []
        self._n_used = 0
        self.copied: Event | None = None

    def clear(self) -> None:
        """Wait until what is here was copied."""
        if self.copied:
            self.copied.synchronize()
        self._n_used = 0

    def empty(self, n: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return a part of the memory, [n, width]."""
        n_bytes = n * width * dtype.itemsize
        if self._n_used == len(self._memory):
            self._memory.append(self._lane.pinned(n_bytes))
        elif len(self._memory[self._n_used]) < n_bytes:
            self._memory[self._n_used] = self._lane.pinned(n_bytes)
        self._n_used += 1
        return self._memory[self._n_used - 1][:n_bytes].view(dtype).view(n, width)

    def holding(self, rows: Tensor) -> Tensor:
        """Return rows in this memory: themselves where they were read into it, else a copy."""
        if any(rows.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in self._memory):
            return rows
        n, width = rows.shape
        return self.empty(n, width, rows.dtype).copy_(rows)


def transfer_to(device: torch.device) -> Transfer:
    """Return the way to this device."""
    return Overlapped(device, CudaLane(device)) if device.type == "cuda" else Transfer(device)
