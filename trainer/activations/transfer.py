"""Transfers batches to the training device while the device is running the previous step."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.activations.base import Empty, Pair, empty_rows, to_device

# The maximum number of batches by which the host may be ahead of the GPU.
AHEAD = 2


class DeviceEvent(Protocol):
    """A point in a device's work queue."""

    def synchronize(self) -> None:
        """Block the host until the device has passed this point."""


class Sent(NamedTuple):
    """A batch in transfer; on a GPU, the transfer is complete once the device has passed `arrival`."""

    pair: Pair
    arrival: DeviceEvent | None = None


class Transfer:
    """A non-overlapping transfer: rows are read into fresh memory, and the training thread moves them to the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> Empty:
        """Return an allocator for the next batch's memory; called, like `send`, by the reader thread."""
        return empty_rows

    def send(self, pair: Pair) -> Sent:
        """Start transferring inputs and targets to the device."""
        return Sent(pair)

    def receive(self, sent: Sent) -> Pair:
        """Return a batch on the device; called by the training thread.

        If inputs and targets are the same tensor, they remain the same tensor.
        """
        return to_device(sent.pair, self._device)


class Lane(Protocol):
    """A queue of copies from the host to the device, separate from the training queue; see `CudaLane`."""

    def pinned(self, n_bytes: int) -> Tensor:
        """Return memory, uint8 [n_bytes], suitable for asynchronous copies."""

    def copy(self, rows: Tensor) -> Tensor:
        """Queue a copy of the rows to the device, and return the copy; copies run in order."""

    def mark(self) -> DeviceEvent:
        """Return an event marking the point after the last queued copy."""

    def meet(self, arrival: DeviceEvent, rows: tuple[Tensor, ...]) -> None:
        """Make the training queue wait for `arrival`, and keep `rows` in memory until training has used them."""


class CudaLane:
    """A separate CUDA stream for copies.

    A batch's memory can only be reused once the GPU has trained on the batch, not as soon as the host has queued the
    training step. Therefore, the host waits if it is more than `AHEAD` batches ahead of the GPU. If the host ran
    further ahead, every further batch would need new memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._met: deque[torch.cuda.Event] = deque()

    def pinned(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, rows: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream):
            return rows.to(self._device, non_blocking=True)

    def mark(self) -> DeviceEvent:
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
    """A transfer overlapping with training: rows are read into pinned memory and copied to the GPU by a `Lane`.

    Two pinned buffers alternate: one is filled while the other is copied. A buffer is only refilled after its copy has
    finished.
    """

    def __init__(self, device: torch.device, lane: Lane) -> None:
        super().__init__(device)
        self._lane = lane
        self._places = itertools.cycle([_PinnedBuffer(lane), _PinnedBuffer(lane)])
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


class _PinnedBuffer:
    """A pinned buffer for one batch's rows; it grows to the size of the largest batch."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._memory: list[Tensor] = []
        self._n_used = 0
        self.copied: DeviceEvent | None = None

    def clear(self) -> None:
        """Wait until the content has been copied, and mark the buffer as empty."""
        if self.copied:
            self.copied.synchronize()
        self._n_used = 0

    def empty(self, n: int, width: int, dtype: torch.dtype) -> Tensor:
        """Allocate rows [n, width] in the buffer."""
        n_bytes = n * width * dtype.itemsize
        if self._n_used == len(self._memory):
            self._memory.append(self._lane.pinned(n_bytes))
        elif len(self._memory[self._n_used]) < n_bytes:
            self._memory[self._n_used] = self._lane.pinned(n_bytes)
        self._n_used += 1
        return self._memory[self._n_used - 1][:n_bytes].view(dtype).view(n, width)

    def holding(self, rows: Tensor) -> Tensor:
        """Return the rows in this buffer: the same tensor if it is already in the buffer, otherwise a copy."""
        if any(rows.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in self._memory):
            return rows
        n, width = rows.shape
        return self.empty(n, width, rows.dtype).copy_(rows)


def transfer_to(device: torch.device) -> Transfer:
    """Return an overlapping transfer for a GPU, or a non-overlapping transfer for a CPU."""
    return Overlapped(device, CudaLane(device)) if device.type == "cuda" else Transfer(device)
