"""What a text gives, made ahead in a thread while the model reads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
# What comes, or what ends it.
_Item = tuple[T | None, BaseException | None]
# Items that are made ahead: batches of tokens, of some hundred kilobytes each. A tokenizer gives those of 64 documents
# at once, between which the model is not to wait.
AHEAD = 8


class ReadAhead(Generic[T]):
    """Gives the items of an iterator, which a thread asks for up to `AHEAD` of them ahead; an error comes in its place.

    The thread ends with the items, with `close`, and once nobody holds this any more; it keeps no process alive.
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
        """End the thread, once it has made the item that it is at: nobody else then uses the tokenizer."""
        self._end()
        self._thread.join()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._closed.set()
        self._places.release()


def _make(
    items: Iterator[T], ready: queue.SimpleQueue[_Item[T]], places: threading.Semaphore, closed: threading.Event
) -> None:
    try:
        while places.acquire() and not closed.is_set():
            ready.put((next(items), None))
    except BaseException as error:
        ready.put((None, error))
