"""Ranks as threads of one process, which exchange through its memory: for machines where process groups do not work."""

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
    """Lets `size` threads exchange objects; a thread that fails releases the others."""

    def __init__(self, size: int, timeout_s: float | None = None) -> None:
        self._left: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=timeout_s)

    def wait(self) -> None:
        """Wait until all threads are here; raise `PeerLost` if one never comes."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost("the connection to another rank was lost (its thread has ended)") from None

    def exchange(self, index: int, own: Any) -> list[Any]:
        """Return the objects of all threads, not copies: nobody may change them before all have met again."""
        self._left[index] = own
        self.wait()
        objects = list(self._left)
        self.wait()
        return objects

    def abort(self) -> None:
        self._barrier.abort()


class Threads(Group):
    """A group of threads, seen from one of them."""

    def __init__(self, meeting: Meeting, size: int, index: int, waiting: Waiting | None = None) -> None:
        self._meeting, self.size, self.index = meeting, size, index
        self.waiting = waiting or HostWaiting()

    def start_sums(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Sum every tensor over the threads: each one adds up a part of the memory and gives it to all."""
        for tensor in tensors:
            flat = dense(tensor).view(-1)
            everybodys = self._tensors_of_all(flat)
            bounds = [len(flat) * rank // self.size for rank in (self.index, self.index + 1)]
            parts = [theirs[bounds[0] : bounds[1]] for theirs in everybodys]
            total = torch.stack([part.to(tensor.device) for part in parts]).sum(dim=0)
            for part in parts:
                part.copy_(total)
            self._wait_for_all(tensor)
        return []

    def sum_parts_(self, tensors: Iterable[Tensor]) -> None:
        self.start_sums(tensors)

    def spread_parts_(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            parts = tensor.tensor_split(self.size)
            for rank, theirs in enumerate(self._tensors_of_all(tensor)):
                if rank != self.index:
                    parts[rank].copy_(theirs.tensor_split(self.size)[rank])
            self._wait_for_all(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        everybodys = self._tensors_of_all(tensor)
        gathered = torch.stack([theirs.to(tensor.device) for theirs in everybodys])
        self._wait_for_all(tensor)
        return gathered

    def to_owners(self, tensor: Tensor) -> Tensor:
        everybodys = self._tensors_of_all(tensor)
        own_rows = torch.stack([own_part(theirs, self).to(tensor.device) for theirs in everybodys])
        self._wait_for_all(tensor)
        return own_rows

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        everybodys = self._tensors_of_all(tensor)
        rows = torch.cat([theirs[self.index].to(tensor.device) for theirs in everybodys])
        self._wait_for_all(tensor)
        return rows

    def copy_from_first_(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            first = self._tensors_of_all(tensor)[0]
            if self.index:
                tensor.copy_(first)
            self._wait_for_all(tensor)

    def collect(self, tensor: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
        everybodys = self._tensors_of_all(tensor)
        tensors = [] if self.index else [theirs.cpu() for theirs in everybodys]
        self._wait_for_all(tensor)
        return tensors

    def _tensors_of_all(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all threads, once the devices have computed them."""
        self._complete(tensor)
        with self.waiting.measure():
            return self._meeting.exchange(self.index, tensor)

    def _wait_for_all(self, tensor: Tensor) -> None:
        """Wait until no thread needs the tensors of the others any more."""
        self._complete(tensor)
        with self.waiting.measure():
            self._meeting.wait()

    def _complete(self, tensor: Tensor) -> None:
        """Wait for the device, since the streams of other threads do not wait for this one's."""
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)


def on_all(size: int, work: Callable[[Threads], T], timeout_s: float | None = None) -> list[T]:
    """Run `work` on `size` threads and return what each one returned; raise what stopped the first of them."""
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
