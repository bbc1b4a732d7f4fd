"""The batches of one rank, read ahead by a thread of its own."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.activations.base import Pair, in_fp32, of_each_hook, to_device
from trainer.activations.micro_batches import Cut, Stretch
from trainer.activations.outliers import Outliers
from trainer.activations.training_data import Read, TrainingData

# The step takes one while the thread reads the next; more would only hide a disk that is too slow on average.
READ_AHEAD = 2


class Batch(NamedTuple):
    """A rank's inputs and targets [n_tokens, d] of each hook, fp32 on its device; `of_all` tokens are in all ranks'."""

    hooks: Sequence[Pair]
    of_all: int


class Batches:
    """Gives this rank its rows of one micro-batch after the other, from position `start` on, outliers replaced.

    Where there are `outliers`, they are those of each hook: a token that is one at a hook stays at the others.

    The tokens of a step are the same however they are cut; those of a stream where ranks have the same shares.
    """

    def __init__(
        self,
        data: TrainingData,
        cut: Cut,
        *,
        start: int,
        device: torch.device,
        outliers: Sequence[Outliers] = (),
    ) -> None:
        self._data, self._device, self._outliers = data, device, outliers
        self._cut, self._start = cut, start
        self._ready: queue.Queue[tuple[Read, int] | BaseException] = queue.Queue(READ_AHEAD)
        self._closed = threading.Event()
        # Where ranks read together: after how many batches all of them end. No thread is further ahead of its step.
        self._last: int | None = None
        self._n_taken = 0
        # Seconds that `next` has waited for a batch so far.
        self.waited_s = 0.0
        data.rewind()
        self._thread = threading.Thread(target=self._read_ahead, name="read-ahead", daemon=True)
        self._thread.start()

    def next(self) -> Batch:
        """Return the next batch on the device; raise the error that stopped the reading."""
        began = time.perf_counter()
        item = self._ready.get()
        self.waited_s += time.perf_counter() - began
        if isinstance(item, BaseException):
            raise item
        self._n_taken += 1
        rows, of_all = item
        self._data.note_trained(rows)
        moved = to_device((rows.x, rows.y), self._device, non_blocking=True)
        hooks = [in_fp32(pair) for pair in of_each_hook(moved, self._data.n_hooks)]
        if self._outliers:
            hooks = [outliers.replace(*pair) for outliers, pair in zip(self._outliers, hooks, strict=True)]
        return Batch(hooks, of_all)

    def close(self) -> None:
        """End the thread; needed before another reader of the same files starts in this process.

        Where ranks read together, all of them call this after the same batch.
        """
        self._last = self._n_taken + READ_AHEAD + 1 if self._data.reads_together else None
        self._closed.set()
        self._thread.join()

    def abandon(self) -> None:
        """End the thread after a failure; do not wait for it where it may wait for other ranks."""
        self._closed.set()
        if not self._data.reads_together:
            self._thread.join()

    def _read_ahead(self) -> None:
        try:
            for n_read, (step_start, stretch) in enumerate(self._stretches()):
                if self._closed.is_set() and n_read >= (self._last or 0):
                    return
                self._put(self._read(step_start, stretch))
        except BaseException as error:
            self._put(error)

    def _stretches(self) -> Iterator[tuple[int, Stretch]]:
        for step_start in itertools.count(self._start, self._cut.n_tokens):
            for stretch in self._cut.stretches:
                yield step_start, stretch

    def _read(self, step_start: int, stretch: Stretch) -> tuple[Read, int]:
        x, y, mark = self._data.read(step_start + stretch.start, stretch.length)
        inputs = self._pin(x)
        return Read(inputs, inputs if y is x else self._pin(y), mark), stretch.of_all

    def _pin(self, rows: Tensor) -> Tensor:
        # Only pinned memory is copied to a GPU while the step runs.
        return rows.pin_memory() if self._device.type == "cuda" else rows

    def _put(self, item: tuple[Read, int] | BaseException) -> None:
        """Wait for room in the queue, but not after `close`, when nobody will take the batch."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return
