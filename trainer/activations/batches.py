"""The batches of one rank, read ahead by a thread of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
import time

import torch
from torch import Tensor

from trainer.activations.base import Source
from trainer.activations.order import Order

# The step takes one while the thread reads the next; more would only hide a disk that is too slow on average.
READ_AHEAD = 2


class Batches:
    """Gives this rank its rows of one global batch after the other, from position `start` on.

    Every global batch of batch_size × world_size tokens is the same however many ranks share it.
    """

    def __init__(
        self,
        source: Source,
        order: Order,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        start: int,
        device: torch.device,
    ) -> None:
        self._source, self._order, self._device = source, order, device
        self._batch_size, self._global_size = batch_size, batch_size * world_size
        self._next = start + rank * batch_size
        self._ready: queue.Queue[tuple[Tensor, Tensor] | BaseException] = queue.Queue(READ_AHEAD)
        self._closed = threading.Event()
        # Seconds that `next` had nothing to give, so far.
        self.waited_s = 0.0
        self._thread = threading.Thread(target=self._read_ahead, name="read-ahead", daemon=True)
        self._thread.start()

    def next(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets [batch_size, d], fp32 on the device; raises what stopped the reading."""
        began = time.perf_counter()
        item = self._ready.get()
        self.waited_s += time.perf_counter() - began
        if isinstance(item, BaseException):
            raise item
        x, y = item
        moved = x.to(self._device, non_blocking=True).float()
        return moved, moved if y is x else y.to(self._device, non_blocking=True).float()

    def close(self) -> None:
        """Ends the thread; needed before another reader of the same files starts in this process."""
        self._closed.set()
        self._thread.join()

    def _read_ahead(self) -> None:
        try:
            while not self._closed.is_set():
                self._put(self._read())
        except BaseException as error:
            self._put(error)

    def _read(self) -> tuple[Tensor, Tensor]:
        x, y = self._source.pairs(self._order.stretch(self._next, self._batch_size))
        self._next += self._global_size
        pinned = self._pinned(x)
        return pinned, pinned if y is x else self._pinned(y)

    def _pinned(self, rows: Tensor) -> Tensor:
        # Only pinned memory is copied to a GPU while the step runs.
        return rows.pin_memory() if self._device.type == "cuda" else rows

    def _put(self, item: tuple[Tensor, Tensor] | BaseException) -> None:
        """Waits for room, but not once nobody will take it."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return
