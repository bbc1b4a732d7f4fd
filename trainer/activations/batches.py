"""The batches of one rank, read ahead by a thread of its own."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from trainer.activations.base import Pair, in_fp32, of_each_hook
from trainer.activations.micro_batches import Cut, Stretch
from trainer.activations.outliers import Outliers
from trainer.activations.row_readers import Exchange
from trainer.activations.training_data import Mark, Read, TrainingData
from trainer.activations.transfer import Sent, Transfer, transfer_to
from trainer.contract.planning.rows_on_gpu import READ_AHEAD


class Batch(NamedTuple):
    """A rank's inputs and targets [n_tokens, d] of each hook on its device; `of_all` tokens are in all ranks'.

    On a CPU they are in fp32, on a GPU as they are stored.
    """

    hooks: Sequence[Pair]
    of_all: int


class Coming(NamedTuple):
    """A batch that was read: its rows on their way to the device, how far a stream is with it, and its tokens."""

    sent: Sent
    mark: Mark | None
    stretch: Stretch


class Arriving(NamedTuple):
    """A batch that was read, and its exchange among the ranks that have each read a part of it."""

    coming: Coming
    exchange: Exchange


class Batches:
    """Gives this rank its rows of one micro-batch after the other, from position `start` on, outliers replaced.

    Where there are `outliers`, they are those of each hook: a token that is one at a hook stays at the others. Without
    `replaces` they are only told how many rows there were, and a step replaces them itself.

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
        replaces: bool = True,
        transfer: Transfer | None = None,
    ) -> None:
        self._data, self._outliers, self._replaces = data, outliers, replaces
        self._device = device
        self._cut, self._start, self._transfer = cut, start, transfer or transfer_to(device)
        self._ready: queue.Queue[Coming | BaseException] = queue.Queue(READ_AHEAD)
        # A batch takes memory of the device only once it has a place in the queue.
        self._places = threading.Semaphore(READ_AHEAD)
        self._closed = threading.Event()
        # Where ranks read together: after how many batches all of them end. No thread is further ahead of its step.
        self._last: int | None = None
        self._n_taken = 0
        # Ranks that read a part each begin to exchange a batch before they train on the one before: the transfer then
        # takes place during that step. All of them begin it between the same two steps, since exchanges of a step must
        # be in one order.
        self._n_ahead = int(data.readers.size > 1)
        self._arriving: deque[Arriving] = deque()
        # Seconds that `next` has waited for a batch so far.
        self.waited_s = 0.0
        data.rewind()
        self._thread = threading.Thread(target=self._read_ahead, name="read-ahead", daemon=True)
        self._thread.start()

    def next(self) -> Batch:
        """Return the next batch on the device; raise the error that stopped the reading."""
        while len(self._arriving) <= self._n_ahead:
            self._arriving.append(self._begin())
        coming, exchange = self._arriving.popleft()
        pair = exchange.finish()
        self._data.note_trained(Read(*pair, coming.mark))
        hooks = of_each_hook(pair, self._data.n_hooks)
        if self._device.type == "cpu":
            # A GPU widens 16 bits in the pass that scales them.
            hooks = [in_fp32(pair) for pair in hooks]
        for outliers in self._outliers:
            outliers.note(len(pair[0]))
        if self._outliers and self._replaces:
            hooks = [outliers.replace(*pair) for outliers, pair in zip(self._outliers, hooks, strict=True)]
        return Batch(hooks, coming.stretch.of_all)

    def _begin(self) -> Arriving:
        """Take the next batch that was read, and begin its exchange."""
        began = time.perf_counter()
        item = self._ready.get()
        self.waited_s += time.perf_counter() - began
        self._places.release()
        if isinstance(item, BaseException):
            raise item
        self._n_taken += 1
        pair = self._transfer.receive(item.sent)
        return Arriving(item, Exchange(pair, item.stretch.length, self._data.readers))

    def close(self) -> None:
        """End the thread; needed before another reader of the same files starts in this process.

        Where ranks read together or a part each, all of them call this after the same batch.
        """
        while self._arriving:
            self._arriving.popleft().exchange.finish()
        self._last = self._n_taken + READ_AHEAD + 1 if self._data.reads_together else None
        self._closed.set()
        self._thread.join()

    def abandon(self) -> None:
        """End the thread after a failure; do not wait for it where it may wait for other ranks."""
        self._closed.set()
        if not self._data.reads_together:
            self._thread.join()

    def _read_ahead(self) -> None:
        if self._device.type == "cuda":
            # A thread begins with the first GPU. There each rank would take memory, and its model's kernels run.
            torch.cuda.set_device(self._device)
        try:
            for n_read, (step_start, stretch) in enumerate(self._stretches()):
                if self._closed.is_set() and n_read >= (self._last or 0):
                    return
                empty = self._transfer.begin()
                x, y, mark = self._data.read(step_start + stretch.start, stretch.length, empty)
                if self._has_place():
                    self._ready.put(Coming(self._transfer.send((x, y)), mark, stretch))
        except BaseException as error:
            if self._has_place():
                self._ready.put(error)

    def _stretches(self) -> Iterator[tuple[int, Stretch]]:
        for step_start in itertools.count(self._start, self._cut.n_tokens):
            for stretch in self._cut.stretches:
                yield step_start, stretch

    def _has_place(self) -> bool:
        """Wait for a place in the queue; there is none after `close`, when nobody will take the batch."""
        while not self._closed.is_set():
            if self._places.acquire(timeout=0.1):
                return True
        return False
