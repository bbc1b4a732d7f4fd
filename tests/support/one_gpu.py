"""Ranks that share one GPU and exchange tensors through host memory; NCCL does not support two ranks on one GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.parallel import rendezvous
from trainer.parallel.group import Group
from trainer.parallel.process_group import Connected
from trainer.parallel.shared_memory import SLOT_BYTES, SharedRanks
from trainer.parallel.waiting import HostWaiting

TIMEOUT = timedelta(seconds=60)


class QuietWaiting(HostWaiting):
    """Suppresses PyTorch's warnings about GPU synchronisation for the copies in an exchange."""

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else 0
        try:
            if mode:
                torch.cuda.set_sync_debug_mode(0)
            with super().measure():
                yield
        finally:
            if mode:
                torch.cuda.set_sync_debug_mode(mode)


class ByHost(SharedRanks):
    """Exchanges GPU tensors through shared memory.

    The tensors are copied to the host, because PyTorch cannot add tensors on different devices.
    """

    def _sum(self, blocks: list[Tensor], total: Tensor) -> None:
        for places, piece in self._exchange_pieces(blocks, max(map(len, blocks))):
            part = total[piece].copy_(blocks[self.index][piece])
            for rank in range(self.size):
                if rank != self.index:
                    part += places[rank, : len(part)].to(part.device)

    def send_to_first(self, tensor: Tensor) -> None:
        super().send_to_first(tensor.cpu())

    def receive_from(self, rank: int, into: Tensor) -> Tensor:
        into.copy_(super().receive_from(rank, torch.empty(into.shape, dtype=into.dtype)))
        return into


class OneGpu(Connected):
    """Several processes on one device, CPU or GPU."""

    def part(self, groups: Sequence[Sequence[int]]) -> Group:
        self._n_parts += 1
        members = next((members for members in groups if self.group.index in members), None)
        if members is None:
            return Group()
        store = dist.PrefixStore(f"part {self._n_parts} of rank {members[0]}", self._store)
        return connected(store, len(members), members.index(self.group.index))


def connected(store: dist.Store, size: int, index: int) -> ByHost:
    """Return the group of `size` processes on this machine, connected through the store."""
    meeting = rendezvous.join(store, size, index, 2 * size * SLOT_BYTES, TIMEOUT.total_seconds())
    assert meeting is not None
    return ByHost(size, index, QuietWaiting(), *meeting)


def join(device: torch.device, rank: int, world_size: int, place: Path) -> OneGpu:
    """Connect the ranks on one device through the file `place`."""
    store = dist.FileStore(str(place), world_size)
    group = connected(dist.PrefixStore("all", store), world_size, rank)
    return OneGpu(device, store, group, QuietWaiting(), TIMEOUT)
