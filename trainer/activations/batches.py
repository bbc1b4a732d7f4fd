"""Batches for one rank, read ahead by a separate thread."""

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
from trainer.activations.micro_batches import Cut, TokenSlice
from trainer.activations.outliers import Outliers
from trainer.activations.row_readers import Exchange
from trainer.activations.training_data import Mark, ReadRows, TrainingData
from trainer.activations.transfer import Sent, Transfer, transfer_to
from trainer.contract.planning.rows_on_gpu import READ_AHEAD


class Batch(NamedTuple):
    """A rank's inputs and targets [n_tokens, d] for each hook, on its device.

    `of_all` is the total number of tokens over all ranks. On a CPU, rows are in fp32. On a GPU, they are in their
    stored dtype, except that int8 rows are in fp32.
    """

    hooks: Sequence[Pair]
    of_all: int


class BatchInTransfer(NamedTuple):
    """A batch being transferred to the device, the stream's position after it, and the batch's token slice."""

    sent: Sent
    mark: Mark | None
    token_slice: TokenSlice


class Arriving(NamedTuple):
    """A batch, and the exchange of its rows among the ranks that each read one part of it."""

    coming: BatchInTransfer
    exchange: Exchange


class Batches:
    """Yields this rank's rows for each micro-batch, starting at position `start`, with outliers replaced.

    `outliers` is empty or has one entry per hook: a token that is an outlier at one hook is kept at the other hooks. If
    `replaces` is False, outliers are only counted here, and the training step replaces them.

    The tokens in a step do not depend on the number of micro-batches or on the ranks' shares. For a stream, this holds
    only as long as the shares do not change.
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
        self._ready: queue.Queue[BatchInTransfer | BaseException] = queue.Queue(READ_AHEAD)
        # A batch is only sent to the device once the queue has a free slot for it.
        self._places = threading.Semaphore(READ_AHEAD)
        self._closed = threading.Event()
        # If ranks read together, the number of batches after which the threads on all ranks stop. It is set before any
        # thread has read more batches than that.
        self._last: int | None = None
        self._n_taken = 0
        # Ranks that each read part of a batch start exchanging their parts before they train on the previous batch, so
        # that the exchange overlaps with the training step. They all start the exchange between the same two steps,
        # because all ranks must issue collectives in the same order.
        self._n_ahead = int(data.readers.size > 1)
        self._arriving: deque[Arriving] = deque()
        # The time `next` has spent waiting for batches, in seconds.
        self.waited_s = 0.0
        data.rewind()
        self._thread = threading.Thread(target=self._read_ahead, name="read-ahead", daemon=True)
        self._thread.start()

    def next(self) -> Batch:
        """Return the next batch on the device; if reading it failed, re-raise the error."""
        while len(self._arriving) <= self._n_ahead:
            self._arriving.append(self._begin())
        coming, exchange = self._arriving.popleft()
        pair = exchange.finish()
        self._data.note_trained(ReadRows(*pair, coming.mark))
        # Rows cross the bus, and are exchanged, as they are stored.
        hooks = of_each_hook(self._data.decoded(pair), self._data.n_hooks)
        if self._device.type == "cpu":
            # On a GPU, the kernel that scales the rows also converts them to fp32.
            hooks = [in_fp32(pair) for pair in hooks]
        for outliers in self._outliers:
            outliers.note(len(pair[0]))
        if self._outliers and self._replaces:
            hooks = [outliers.replace(*pair) for outliers, pair in zip(self._outliers, hooks, strict=True)]
        return Batch(hooks, coming.token_slice.of_all)

    def _begin(self) -> Arriving:
        """Take the next batch from the queue and start its exchange."""
        began = time.perf_counter()
        item = self._ready.get()
        self.waited_s += time.perf_counter() - began
        self._places.release()
        if isinstance(item, BaseException):
            raise item
        self._n_taken += 1
        pair = self._transfer.receive(item.sent)
        return Arriving(item, Exchange(pair, item.token_slice.length, self._data.readers))

    def close(self) -> None:
        """Stop the thread; call this before starting another reader of the same files in this process.

        If ranks read together, or each read a part of a batch, all ranks must call this after the same batch.
        """
        while self._arriving:
            self._arriving.popleft().exchange.finish()
        self._last = self._n_taken + READ_AHEAD + 1 if self._data.reads_together else None
        self._closed.set()
        self._join()

    def _join(self) -> None:
        """Wait for the thread, which gives up waiting for shards from a URL."""
        for cache in self._data.caches:
            cache.is_interrupted = True
        self._thread.join()
        for cache in self._data.caches:
            cache.is_interrupted = False

    def abandon(self) -> None:
        """Stop the thread after a failure; do not join the thread if it may be waiting for other ranks."""
        self._closed.set()
        if not self._data.reads_together:
            self._join()

    def _read_ahead(self) -> None:
        if self._device.type == "cuda":
            # A new thread's current device is GPU 0. Without this call, every rank would allocate memory and run
            # kernels on GPU 0.
            torch.cuda.set_device(self._device)
        try:
            for n_read, (step_start, token_slice) in enumerate(self._token_slices()):
                if self._closed.is_set() and n_read >= (self._last or 0):
                    return
                empty = self._transfer.begin()
                x, y, mark = self._data.read(step_start + token_slice.start, token_slice.length, empty)
                if self._has_place():
                    self._ready.put(BatchInTransfer(self._transfer.send((x, y)), mark, token_slice))
        except BaseException as error:
            if self._has_place():
                self._ready.put(error)

    def _token_slices(self) -> Iterator[tuple[int, TokenSlice]]:
        for step_start in itertools.count(self._start, self._cut.n_tokens):
            for token_slice in self._cut.token_slices:
                yield step_start, token_slice

    def _has_place(self) -> bool:
        """Wait for a free slot in the queue and return True; return False if `close` or `abandon` was called."""
        while not self._closed.is_set():
            if self._places.acquire(timeout=0.1):
                return True
        return False
