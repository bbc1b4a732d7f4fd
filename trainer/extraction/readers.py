"""Language models on devices of their own, each in a thread that reads ahead while the SAE trains."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from trainer.activations.base import Pair
from trainer.extraction.packing import Batch

# Batches that a device reads, or has read, beyond the one that is asked for: one to read on, and one that is done.
AHEAD = 2
Read = Callable[[Batch], Pair]
_Tasks = queue.SimpleQueue[tuple[Batch, Future[Pair]] | None]


class Readers:
    """Reads batch i of a text by function i mod n of `reads`, each in a thread; gives what they return in that order.

    No more than `AHEAD` batches are read ahead by each, and by whom a batch is read never changes what comes out. The
    text is cut up in the caller's thread. The threads end with the text, with an error, with `close`, and once nobody
    holds this any more; they keep no process alive.
    """

    def __init__(self, reads: Sequence[Read], batches: Iterator[Batch]) -> None:
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
        """Return the rows of the next batch, None where the text has ended; raise the error of its reading."""
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
        """End the threads, after the batch that each is reading: its model can then be used by others."""
        self._end()
        for thread in self._threads:
            thread.join()

    def __del__(self) -> None:
        self._end()

    def _begin_next(self) -> bool:
        """Start to read the next batch; return False after the last.

        An error of the text comes when all batches before it have been given.
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
        """Have the threads end as soon as they can, and give nothing any more."""
        self._batches = iter(())
        while self._pending:
            self._pending.popleft().cancel()
        for tasks in self._tasks:
            tasks.put(None)


def _work(read: Read, tasks: _Tasks) -> None:
    """Read what comes until None does."""
    while (task := tasks.get()) is not None:
        batch, asked = task
        if not asked.set_running_or_notify_cancel():
            continue
        try:
            asked.set_result(read(batch))
        except BaseException as error:
            asked.set_exception(error)
        # While it waits it shall hold no rows, which may be gigabytes.
        del task, batch, asked
