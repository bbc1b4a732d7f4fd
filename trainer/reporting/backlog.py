"""A bounded queue between a thread that adds items and a thread that stores them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Backlog(Generic[T]):
    """Keeps the latest `most` items, oldest first; `dropped` is the number of discarded items."""

    def __init__(self, most: int) -> None:
        self.dropped = 0
        self._most = most
        self._items: deque[T] = deque()
        # The lock is held only for microseconds, so the thread that adds items never waits for a disk.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, items: Iterable[T]) -> None:
        with self._lock:
            self._items.extend(items)
            self._trim()

    def take(self, most: int) -> list[T]:
        """Remove and return the oldest `most` items."""
        with self._lock:
            return [self._items.popleft() for _ in range(min(most, len(self._items)))]

    def put_back(self, items: list[T]) -> None:
        """Put the unwritten items from the last `take` back at the front of the queue."""
        with self._lock:
            self._items.extendleft(reversed(items))
            self._trim()

    def _trim(self) -> None:
        while len(self._items) > self._most:
            self._items.popleft()
            self.dropped += 1
