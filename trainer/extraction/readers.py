"""Runs language models on separate devices, each in a thread that reads ahead while the SAE is training."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from trainer.activations.base import Pair
from trainer.extraction.packing import ContextBatch

# The number of batches that each device reads ahead: one in progress and one finished.
AHEAD = 2
Read = Callable[[ContextBatch], Pair]
_Tasks = queue.SimpleQueue[tuple[ContextBatch, Future[Pair]] | None]


class Readers:
    """Reads batch i of a text with `reads[i % len(reads)]`, and returns the rows in text order.

    Each function runs in its own thread and reads at most `AHEAD` batches in advance. The rows do not depend on which
    function reads a batch. Batches are created in the caller's thread. The threads exit at the end of the text, on an
    error, on `close`, or when this object is deleted. The threads are daemons, so they do not keep the process alive.
    """

    def __init__(self, reads: Sequence[Read], batches: Iterator[ContextBatch]) -> None:
        self._batches, self._n_begun = batches, 0
        self._pending: deque[Future[Pair]] = deque()
        self._tasks = [_Tasks() for _ in reads]
        self._threads = [
            threading.Thread(target=_work, args=(read, tasks), name="model-reader", daemon=True)
            for read, tasks in zip(reads, self._tasks, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> Pair | None:
        """Return the next batch's rows, or None at the end of the text.

        If reading the batch failed, re-raise the error.
        """
        while len(self._pending) <= AHEAD * len(self._tasks) and self._begin_next():
            pass
        if not self._pending:
            self._end()
            return None
        try:
            return self._pending.popleft().result()
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Stop the threads after their current batches, and wait until they have exited and released the models."""
        self._end()
        for thread in self._threads:
            thread.join()

    def __del__(self) -> None:
        self._end()

    def _begin_next(self) -> bool:
        """Queue the next batch for reading; return False if there are no more batches.

        If the text raises an error, `next` raises this error after it has returned the rows of all earlier batches.
        """
        asked: Future[Pair] = Future()
        try:
            batch = next(self._batches, None)
        except Exception as error:
            asked.set_exception(error)
            self._batches = iter(())
        else:
            if batch is None:
                return False
            self._tasks[self._n_begun % len(self._tasks)].put((batch, asked))
            self._n_begun += 1
        self._pending.append(asked)
        return True

    def _end(self) -> None:
        """Make the threads exit as soon as possible, and discard all pending results."""
        self._batches = iter(())
        while self._pending:
            self._pending.popleft().cancel()
        for tasks in self._tasks:
            tasks.put(None)


def _work(read: Read, tasks: _Tasks) -> None:
    """Read batches from a queue until it contains None."""
    while (task := tasks.get()) is not None:
        batch, asked = task
        if not asked.set_running_or_notify_cancel():
            continue
        try:
            asked.set_result(read(batch))
        except BaseException as error:
            asked.set_exception(error)
        # Release the rows, which may be gigabytes, before waiting for the next task.
        del task, batch, asked
