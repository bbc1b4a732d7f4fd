"""Ranks as threads of this process, for what exchanges tensors but needs no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.parallel.group import Group

T = TypeVar("T")


class Meeting:
    """Where the threads leave what they exchange; one who fails lets the others go."""

    def __init__(self, size: int) -> None:
        self.left: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def exchange(self, index: int, own: Any) -> list[Any]:
        self.left[index] = own
        self._barrier.wait()
        found = list(self.left)
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class Thread(Group):
    """One of the threads."""

    def __init__(self, meeting: Meeting, size: int, index: int) -> None:
        self._meeting, self.size, self.index = meeting, size, index
        self.n_gathered = 0

    def start_sums(self, tensors: Iterable[Tensor]) -> list[Any]:
        for tensor in tensors:
            tensor.copy_(torch.stack(self._meeting.exchange(self.index, tensor.clone())).sum(dim=0))
        return []

    def gather(self, tensor: Tensor) -> Tensor:
        self.n_gathered += tensor.numel()
        return torch.stack(self._meeting.exchange(self.index, tensor.clone()))

    def collect(self, tensor: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
        found = self._meeting.exchange(self.index, tensor.clone())
        assert [one.shape[dim] for one in found] == sizes
        return [] if self.index else found


def on_all(size: int, work: Callable[[Thread], T]) -> list[T]:
    """What `work` returns on each of so many threads."""
    meeting = Meeting(size)

    def run(index: int) -> T:
        try:
            return work(Thread(meeting, size, index))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
