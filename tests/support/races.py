"""Finds races between the queues of several GPUs, each simulated by a thread.

A queue that reads or overwrites another queue's data must first wait for a `Moment` that the other queue recorded after
accessing the data. The real timing of the threads does not matter, because only these waits determine the order of two
queues.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.parallel.threads import Threads, on_all

T = TypeVar("T")
HERE = threading.local()


class Queue:
    """A queue of GPU operations.

    `seen` contains its own time and, for every other queue, the latest time it has waited for.
    """

    def __init__(self, index: int) -> None:
        self.index, self.seen = index, {index: 0}

    def has_seen(self, index: int, time: int) -> bool:
        return self.seen.get(index, 0) >= time


class Moment:
    """Replaces a GPU event: marks the end of the operations already in this thread's queue."""

    def __init__(self, device: torch.device) -> None:
        self._seen = dict(HERE.queue.seen)

    def hold(self, device: torch.device) -> None:
        mine = HERE.queue.seen
        mine.update({index: max(time, mine.get(index, 0)) for index, time in self._seen.items()})


class Access(NamedTuple):
    """A queue's access to a byte range of a block of memory, with the time of the access in that queue."""

    begin: int
    end: int
    is_write: bool
    queue: int
    time: int

    def harms(self, other: Access) -> bool:
        """Return whether the two accesses overlap and at least one of them is a write."""
        return (self.is_write or other.is_write) and self.begin < other.end and other.begin < self.end

    def __str__(self) -> str:
        return "writes" if self.is_write else "reads"


class Memory(NamedTuple):
    """The accesses to a block of memory; `kept` prevents other tensors from reusing the block."""

    kept: Tensor
    accesses: list[Access]


class Watch(TorchDispatchMode):
    """Records a thread's reads and writes in a table shared by all threads, and each race in `races`."""

    def __init__(self, queue: Queue, table: dict[int, Memory], races: list[str], lock: threading.Lock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._queue, self._table, self._races, self._lock = queue, table, races, lock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        with self._lock:
            self._queue.seen[self._queue.index] += 1
            # Creating a view neither reads nor writes data.
            if not func.is_view:
                written = [*_written(func, args, kwargs), *_tensors(result)]
                read = [one for one in _tensors([args, kwargs]) if all(one is not other for other in written)]
                self._note(str(func), read, is_write=False)
                self._note(str(func), written, is_write=True)
        return result

    def _note(self, name: str, tensors: list[Tensor], *, is_write: bool) -> None:
        for tensor in tensors:
            begin, end = _extent(tensor)
            now = Access(begin, end, is_write, self._queue.index, self._queue.seen[self._queue.index])
            key = tensor.untyped_storage().data_ptr()
            accesses = self._table.setdefault(key, Memory(tensor, [])).accesses
            for before in accesses:
                if now.harms(before) and not self._queue.has_seen(before.queue, before.time):
                    self._races.append(f"queue {now.queue}: {name} {now} what queue {before.queue} {before}")
            accesses.append(now)


def races_in(size: int, work: Callable[[Threads], object]) -> list[str]:
    """Return descriptions of the races between the queues of `size` threads that call `work`.

    The test must patch `Moment` into the modules under test.
    """
    table: dict[int, Memory] = {}
    races: list[str] = []
    lock = threading.Lock()

    def watched(group: Threads) -> None:
        HERE.queue = Queue(group.index)
        with Watch(HERE.queue, table, races, lock):
            work(group)

    on_all(size, watched, timeout_s=60)
    return races


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the offsets, in bytes from the start of its storage, of a tensor's first byte and of the byte after it."""
    begin = tensor.storage_offset()
    last = begin + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(begin) * tensor.itemsize, (int(last) + 1) * tensor.itemsize


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    given = itertools.zip_longest(func._schema.arguments, args)
    by_name = {one.name: value for one, value in given if one is not None} | kwargs
    changed = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return _tensors([by_name.get(name) for name in changed])
