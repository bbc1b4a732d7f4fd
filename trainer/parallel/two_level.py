"""Sums CPU tensors over ranks on several nodes: first inside each node, through its memory, and then between the nodes.

With two nodes of two ranks, each node sends the size of a tensor to sum it; in gloo's ring over all four ranks, it
sends 1.5 times that size. If ranks share the optimizer step, each node sends the size of the tensor to sum it and to
receive the new weights, instead of 2.25 times that size. NCCL chooses its own order, so ranks on GPUs do not use this
group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.parallel.group import DistributedGroup, dense, exchanging, packs, split_by, wide
from trainer.parallel.shared_memory import SMALL, SharedRanks, flat_parts
from trainer.parallel.waiting import Waiting

# The number of values that are exchanged between the nodes at a time.
PIECE = 2**21


class TwoLevelGroup(DistributedGroup):
    """A group of CPU ranks with the same number of ranks on each of several nodes.

    `inner` contains this node's ranks, and `across` one rank of each node, at the same place in its node.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, waiting: Waiting, inner: SharedRanks, across: dist.ProcessGroup
    ) -> None:
        super().__init__(group, waiting)
        self._inner, self._across = inner, across

    def start_sums(self, tensors: Iterable[Tensor]) -> list[Any]:
        return [_PendingLevels(self, list(tensors))]

    def add_up(self, tensors: list[Tensor]) -> None:
        """Replace every tensor with its sum over the group.

        While one piece of a tensor is exchanged between the nodes, the next one is summed inside each node.
        """
        small, large = split_by(lambda tensor: tensor.numel() < SMALL, tensors)
        for pack in packs(small):
            self._inner.add_up([pack.flat])
            dist.all_reduce(pack.flat, group=self._across)
            pack.unpack()
        started: tuple[Any, list[Tensor]] | None = None
        for piece in (piece for tensor in large for piece in dense(tensor).view(-1).split(PIECE)):
            blocks = flat_parts(piece, self._inner.size)
            self._inner.sum_blocks(blocks)
            # This rank's block contains the sum over its node.
            transfer = dist.all_reduce(blocks[self._inner.index], group=self._across, async_op=True)
            self._finish_piece(started)
            started = transfer, blocks
        self._finish_piece(started)

    def _finish_piece(self, started: tuple[Any, list[Tensor]] | None) -> None:
        if started:
            transfer, blocks = started
            transfer.wait()
            self._inner.spread_blocks(blocks)

    def sum_parts_(self, tensors: Iterable[Tensor]) -> None:
        with exchanging(self._waiting):
            for tensor in tensors:
                self._sum_parts(flat_parts(tensor, self.size))

    def start_sum_parts(self, tensors: Iterable[Tensor]) -> list[Any]:
        self.sum_parts_(tensors)
        return []

    def _sum_parts(self, parts: list[Tensor]) -> None:
        """Replace this rank's part with its sum over the group; the other parts become undefined."""
        for on_node in self._by_node(parts):
            self._inner.sum_blocks(on_node)
        # These parts now contain sums over this node; each belongs to the rank at this rank's place in another node.
        mine, own = parts[self._inner.index :: self._inner.size], parts[self.index]
        received = own.new_empty(len(mine), len(own))
        sizes = [len(own)] * len(mine)
        dist.all_to_all_single(received.view(-1), torch.cat(mine), sizes, [*map(len, mine)], group=self._across)
        own.copy_(wide(received).sum(dim=0))

    def spread_parts_(self, tensors: Iterable[Tensor]) -> None:
        with exchanging(self._waiting):
            for tensor in tensors:
                self._spread_parts(flat_parts(tensor, self.size))

    def start_spread(self, tensors: Iterable[Tensor]) -> list[Any]:
        self.spread_parts_(tensors)
        return []

    def _spread_parts(self, parts: list[Tensor]) -> None:
        """Receive the other ranks' parts: first from this rank's place in other nodes, then in this node."""
        mine, own = parts[self._inner.index :: self._inner.size], parts[self.index]
        sizes = [*map(len, mine)]
        received = own.new_empty(sum(sizes))
        sent = [len(own)] * len(mine)
        dist.all_to_all_single(received, own.repeat(len(mine)), sizes, sent, group=self._across)
        for part, whole in zip(mine, received.split(sizes), strict=True):
            part.copy_(whole)
        for on_node in self._by_node(parts):
            self._inner.spread_blocks(on_node)

    def _by_node(self, parts: list[Tensor]) -> list[list[Tensor]]:
        """Return the parts that belong to each node's ranks."""
        n = self._inner.size
        return [parts[first : first + n] for first in range(0, self.size, n)]


class _PendingLevels:
    """A handle for sums that `wait` computes."""

    def __init__(self, group: TwoLevelGroup, tensors: list[Tensor]) -> None:
        self._group, self._tensors = group, tensors

    def wait(self) -> None:
        self._group.add_up(self._tensors)
