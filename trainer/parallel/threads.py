"""Runs ranks as threads in one process, for machines where process groups do not work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.parallel.group import Group, PeerLost, dense, local_shard
from trainer.parallel.waiting import HostWaiting, Waiting
from trainer.runtime.device_queue import Moment, moment

T = TypeVar("T")


class Meeting:
    """Lets `size` threads exchange objects; a failing thread calls `abort` to release the other threads."""

    def __init__(self, size: int, timeout_s: float | None = None) -> None:
        # Alternate between two tables, so that a thread writes to a table again only after all threads have read it.
        self._tables: list[list[Any]] = [[None] * size for _ in range(2)]
        self._n_times = [0] * size
        self._barrier = threading.Barrier(size, timeout=timeout_s)

    def exchange(self, index: int, own: Any) -> list[Any]:
        """Return all threads' objects without copying them; do not modify an object before the next exchange ends.

        Raise `PeerLost` if a thread fails or does not arrive in time.
        """
        table = self._tables[self._n_times[index] % 2]
        self._n_times[index] += 1
        table[index] = own
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost("the connection to another rank was lost (its thread has ended)") from None
        return list(table)

    def abort(self) -> None:
        self._barrier.abort()


class Threads(Group):
    """A group of threads, as seen by one thread."""

    def __init__(self, meeting: Meeting, size: int, index: int, waiting: Waiting | None = None) -> None:
        self._meeting, self.size, self.index = meeting, size, index
        self.waiting = waiting or HostWaiting()

    def start_sums(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Sum every tensor over the threads: each thread sums one part and copies the result to all threads."""
        for tensor in tensors:
            flat = dense(tensor).view(-1)
            of_ranks = self._tensors_of_all(flat)
            bounds = [len(flat) * rank // self.size for rank in (self.index, self.index + 1)]
            parts = [theirs[bounds[0] : bounds[1]] for theirs in of_ranks]
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
        of_ranks = self._tensors_of_all(tensor)
        gathered = torch.stack([theirs.to(tensor.device) for theirs in of_ranks])
        self._wait_for_all(tensor)
        return gathered

    def to_owners(self, tensor: Tensor) -> Tensor:
        of_ranks = self._tensors_of_all(tensor)
        own_rows = torch.stack([local_shard(theirs, self).to(tensor.device) for theirs in of_ranks])
        self._wait_for_all(tensor)
        return own_rows

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        of_ranks = self._tensors_of_all(tensor)
        rows = torch.cat([theirs[self.index].to(tensor.device) for theirs in of_ranks])
        self._wait_for_all(tensor)
        return rows

    def copy_from_first_(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            first = self._tensors_of_all(tensor)[0]
            if self.index:
                tensor.copy_(first)
            self._wait_for_all(tensor)

    def collect(self, tensor: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
        of_ranks = self._tensors_of_all(tensor)
        tensors = [] if self.index else [theirs.cpu() for theirs in of_ranks]
        self._wait_for_all(tensor)
        return tensors

    def _tensors_of_all(self, tensor: Tensor) -> list[Tensor]:
        """Return all threads' tensors; GPU work queued later waits until these tensors are computed."""
        with self.waiting.measure():
            of_ranks = self._meet(tensor)
            for theirs, computed in of_ranks:
                # A copy between two GPUs runs in the source GPU's queue.
                computed.hold(theirs.device)
                computed.hold(tensor.device)
        return [theirs for theirs, _ in of_ranks]

    def _wait_for_all(self, tensor: Tensor) -> None:
        """Make GPU work queued later wait until all threads have finished reading each other's tensors."""
        with self.waiting.measure():
            for _, read in self._meet(tensor):
                read.hold(tensor.device)

    def _meet(self, tensor: Tensor) -> list[tuple[Tensor, Moment]]:
        """Return each thread's tensor, and the point at which its device has finished all queued work."""
        return self._meeting.exchange(self.index, (tensor, moment(tensor.device)))


def on_all(size: int, work: Callable[[Threads], T], timeout_s: float | None = None) -> list[T]:
    """Run `work` on `size` threads and return the results; if a thread fails, raise the first exception."""
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
