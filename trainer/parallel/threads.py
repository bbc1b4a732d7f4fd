"""Ranks as threads of one process, which exchange through its memory: for a box where process groups do not work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.parallel.group import Group, PeerLost, dense, own_part
from trainer.parallel.waiting import HostWaiting, Waiting

T = TypeVar("T")


class Meeting:
    """Where so many threads leave what they exchange; one who fails lets the others go."""

    def __init__(self, size: int, timeout_s: float | None = None) -> None:
        self._left: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=timeout_s)

    def wait(self) -> None:
        """Until all are here; raises `PeerLost` where one never comes."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost("the connection to another rank was lost (its thread has ended)") from None

    def exchange(self, index: int, own: Any) -> list[Any]:
        """What every thread has left, as it is: not to be changed before all have met again."""
        self._left[index] = own
        self.wait()
        found = list(self._left)
        self.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class Threads(Group):
    """One of the threads."""

    def __init__(self, meeting: Meeting, size: int, index: int, waiting: Waiting | None = None) -> None:
        self._meeting, self.size, self.index = meeting, size, index
        self.waiting = waiting or HostWaiting()

    def start_sums(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Each thread adds up a part of the memory and gives it to all."""
        for tensor in tensors:
            flat = dense(tensor).view(-1)
            everybodys = self._exchanged(flat)
            bounds = [len(flat) * rank // self.size for rank in (self.index, self.index + 1)]
            parts = [theirs[bounds[0] : bounds[1]] for theirs in everybodys]
            total = torch.stack([part.to(tensor.device) for part in parts]).sum(dim=0)
            for part in parts:
                part.copy_(total)
            self._met(tensor)
        return []

    def sum_parts_(self, tensors: Iterable[Tensor]) -> None:
        self.start_sums(tensors)

    def spread_parts_(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            parts = tensor.tensor_split(self.size)
            for rank, theirs in enumerate(self._exchanged(tensor)):
                if rank != self.index:
                    parts[rank].copy_(theirs.tensor_split(self.size)[rank])
            self._met(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        everybodys = self._exchanged(tensor)
        found = torch.stack([theirs.to(tensor.device) for theirs in everybodys])
        self._met(tensor)
        return found

    def to_owners(self, tensor: Tensor) -> Tensor:
        everybodys = self._exchanged(tensor)
        found = torch.stack([own_part(theirs, self).to(tensor.device) for theirs in everybodys])
        self._met(tensor)
        return found

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        everybodys = self._exchanged(tensor)
        found = torch.cat([theirs[self.index].to(tensor.device) for theirs in everybodys])
        self._met(tensor)
        return found

    def copy_from_first_(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            first = self._exchanged(tensor)[0]
            if self.index:
                tensor.copy_(first)
            self._met(tensor)

    def collect(self, tensor: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
        everybodys = self._exchanged(tensor)
        found = [] if self.index else [theirs.cpu() for theirs in everybodys]
        self._met(tensor)
        return found

    def _exchanged(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, complete."""
        self._complete(tensor)
        with self.waiting.measured():
            return self._meeting.exchange(self.index, tensor)

    def _met(self, tensor: Tensor) -> None:
        """Until nobody needs the tensors of the others any more."""
        self._complete(tensor)
        with self.waiting.measured():
            self._meeting.wait()

    def _complete(self, tensor: Tensor) -> None:
        """Other threads' streams do not wait for this one's."""
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)


def on_all(size: int, work: Callable[[Threads], T], timeout_s: float | None = None) -> list[T]:
    """What `work` returns on each of so many threads; raises what stopped the first of them."""
    meeting, stopped = Meeting(size, timeout_s), []

    def run(index: int) -> T:
        try:
            return work(Threads(meeting, size, index))
        except BaseException as error:
            stopped.append(error)
            meeting.abort()
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(run, index) for index in range(size)]
    if stopped:
        raise stopped[0]
    return [future.result() for future in futures]
