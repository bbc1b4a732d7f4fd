"""Prepares the next batches of tokens in a thread while the model is reading the current batch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
# An item, or the exception that ended the iteration.
_Item = tuple[T | None, BaseException | None]
# The number of items to prepare in advance. Each item is a batch of tokens, a few hundred kilobytes in size. The
# tokenizer processes 64 documents at a time, and the model should not have to wait for the next 64 documents.
AHEAD = 8


class ReadAhead(Generic[T]):
    """Iterates over items that a thread prepares up to `AHEAD` items in advance.

    An error in the thread is raised after all earlier items have been returned. The thread exits after the last item,
    on `close`, or when this object is deleted. The thread is a daemon, so it does not keep the process alive.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._ready: queue.SimpleQueue[_Item[T]] = queue.SimpleQueue()
        self._places, self._closed = threading.Semaphore(AHEAD), threading.Event()
        self._has_ended = False
        asked = (items, self._ready, self._places, self._closed)
        self._thread = threading.Thread(target=_make, args=asked, name="text-reader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._has_ended:
            raise StopIteration
        item, error = self._ready.get()
        self._places.release()
        if error is None:
            return item  # type: ignore[return-value]
        self._has_ended = True
        raise error

    def close(self) -> None:
        """Stop the thread after its current item, and wait until it has exited and no longer uses the tokenizer."""
        self._end()
        self._thread.join()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._closed.set()
        self._places.release()


def _make(
    items: Iterator[T], ready: queue.SimpleQueue[_Item[T]], indices: threading.Semaphore, closed: threading.Event
) -> None:
    try:
        while indices.acquire() and not closed.is_set():
            ready.put((next(items), None))
    except BaseException as error:
        ready.put((None, error))
