"""What waits to be written: handed over by one thread, taken by another, never more than there is room for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Backlog(Generic[T]):
    """The newest `most` items, oldest first; `dropped` counts those there was no room for."""

    def __init__(self, most: int) -> None:
        self.dropped = 0
        self._most = most
        self._items: deque[T] = deque()
        # Held for microseconds, so that who hands over never waits for a disk.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, items: Iterable[T]) -> None:
        with self._lock:
            self._items.extend(items)
            self._trim()

    def take(self, most: int) -> list[T]:
        """The oldest ones; they are no longer here."""
        with self._lock:
            return [self._items.popleft() for _ in range(min(most, len(self._items)))]

    def put_back(self, items: list[T]) -> None:
        """Those taken last, which could not be written."""
        with self._lock:
            self._items.extendleft(reversed(items))
            self._trim()

    def _trim(self) -> None:
        while len(self._items) > self._most:
            self._items.popleft()
            self.dropped += 1
