"""Ranks that exchange tensors. Its null form is one rank alone, so that nothing else asks whether there are several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.parallel.waiting import Waiting
from trainer.runtime.out_of_memory import is_shortage

# Under the names of torch 2.13, and those of before.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class PeerLost(UserError):
    """Another rank has ended, so this one cannot go on."""


class Group:
    """One rank alone: what is summed or gathered over it is what it was."""

    size, index = 1, 0
    # Given to others since the start; None where only the library that does it knows.
    sent_bytes: int | None = 0

    def start_sums(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Begin to replace every tensor by its sum over the group; `finish` ends it."""
        return []

    def finish(self, transfers: list[Any]) -> None:
        """Wait for what was begun; raises `PeerLost` where a rank is gone."""

    def sum_(self, *tensors: Tensor) -> None:
        """Replace every tensor by its sum over the group."""
        self.finish(self.start_sums(tensors))

    def sum_parts_(self, tensors: Iterable[Tensor]) -> None:
        """Replace this rank's part of every tensor by its sum over the group; the others' are then undefined.

        The parts are those of `tensor_split` along the first dimension.
        """

    def spread_parts_(self, tensors: Iterable[Tensor]) -> None:
        """Replace every other rank's part of every tensor, split likewise, by what that rank has there."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Everybody's tensor of this shape, [size, ...]."""
        return tensor[None]

    def to_owners(self, tensor: Tensor) -> Tensor:
        """Everybody's rows of which this rank has its `own_part`, [size, n_own, ...], from each rank's of all rows."""
        return tensor[None]

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        """What the owners of the rows made for this rank [n_rows, ...], from what it made for each, [size, n_own, ...].

        `tensor` is for the other ranks as `to_owners` is from them.
        """
        return tensor[0]

    def copy_from_first_(self, tensors: Iterable[Tensor]) -> None:
        """Replace every tensor by that of the group's first rank."""

    def send_to_first(self, tensor: Tensor) -> None:
        """For `received_from` on the first rank."""

    def received_from(self, rank: int, into: Tensor) -> Tensor:
        """What this rank sends next, in the tensor that takes it; for the first rank."""
        return into

    def collect(self, tensor: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
        """On the first rank everybody's tensor, on the CPU one after the other; `sizes` are theirs along `dim`."""
        return [tensor.cpu()]


class Processes(Group):
    """Several ranks, each a process of its own."""

    def __init__(self, size: int, index: int, waiting: Waiting) -> None:
        self.size, self.index, self._waiting = size, index, waiting

    def finish(self, transfers: list[Any]) -> None:
        with exchanging(self._waiting):
            for transfer in transfers:
                transfer.wait()

    def collect(self, tensor: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
        if self.index:
            self.send_to_first(tensor)
            return []
        return [tensor.cpu(), *(self._collected(tensor, sizes[rank], dim, rank) for rank in range(1, self.size))]

    def _collected(self, like: Tensor, size: int, dim: int, rank: int) -> Tensor:
        shape = list(like.shape)
        shape[dim] = size
        return self.received_from(rank, like.new_empty(shape)).cpu()


class Ranks(Processes):
    """Processes on any machines, by the collectives of `torch.distributed`."""

    sent_bytes: int | None = None

    def __init__(self, group: dist.ProcessGroup | None, waiting: Waiting) -> None:
        super().__init__(dist.get_world_size(group), dist.get_rank(group), waiting)
        self._group = group

    def start_sums(self, tensors: Iterable[Tensor]) -> list[Any]:
        with exchanging(self._waiting):
            return [dist.all_reduce(dense(tensor), group=self._group, async_op=True) for tensor in tensors]

    def sum_parts_(self, tensors: Iterable[Tensor]) -> None:
        with exchanging(self._waiting):
            for tensor in tensors:
                # Parts of one size only can be sent so; not every version of gloo can at all.
                if tensor.is_cuda and len(tensor) % self.size == 0:
                    _reduce_scatter(tensor.tensor_split(self.size)[self.index], tensor, group=self._group)
                else:
                    dist.all_reduce(tensor, group=self._group)

    def spread_parts_(self, tensors: Iterable[Tensor]) -> None:
        with exchanging(self._waiting):
            for tensor in tensors:
                parts = tensor.tensor_split(self.size)
                if len(tensor) % self.size == 0:
                    _all_gather(tensor, parts[self.index], group=self._group)
                    continue
                for rank, part in enumerate(parts):
                    dist.broadcast(part, group=self._group, group_src=rank)

    def gather(self, tensor: Tensor) -> Tensor:
        found = tensor.new_empty(self.size, *tensor.shape)
        with exchanging(self._waiting):
            dist.all_gather(list(found), tensor.contiguous(), group=self._group)
        return found

    def to_owners(self, tensor: Tensor) -> Tensor:
        sizes = part_sizes(len(tensor), self.size)
        found = tensor.new_empty(self.size, sizes[self.index], *tensor.shape[1:])
        with exchanging(self._waiting):
            dist.all_to_all_single(
                found.flatten(0, 1), tensor.contiguous(), [sizes[self.index]] * self.size, sizes, group=self._group
            )
        return found

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        found, sizes = tensor.new_empty(n_rows, *tensor.shape[2:]), part_sizes(n_rows, self.size)
        with exchanging(self._waiting):
            dist.all_to_all_single(
                found, tensor.flatten(0, 1).contiguous(), sizes, [sizes[self.index]] * self.size, group=self._group
            )
        return found

    def copy_from_first_(self, tensors: Iterable[Tensor]) -> None:
        with exchanging(self._waiting):
            for tensor in tensors:
                dist.broadcast(dense(tensor), group=self._group, group_src=0)

    def send_to_first(self, tensor: Tensor) -> None:
        with exchanging(self._waiting):
            dist.send(tensor.contiguous(), group=self._group, group_dst=0)

    def received_from(self, rank: int, into: Tensor) -> Tensor:
        with exchanging(self._waiting):
            dist.recv(into, group=self._group, group_src=rank)
        return into


def dense(tensor: Tensor) -> Tensor:
    """The same memory without gaps: a matrix may be stored column by column, and a transfer asks for rows."""
    return tensor.T if tensor.dim() == 2 and not tensor.is_contiguous() else tensor


@contextlib.contextmanager
def exchanging(waiting: Waiting) -> Iterator[None]:
    """Counts as waiting, and fails as the loss of a peer."""
    with peers_expected("the connection to another rank was lost"), waiting.measured():
        yield


@contextlib.contextmanager
def peers_expected(otherwise: str) -> Iterator[None]:
    """Tell a failed exchange as `otherwise` with PyTorch's reason; memory that runs out is our own."""
    try:
        yield
    except RuntimeError as error:  # dist.DistError among them
        # NCCL, which takes memory of its own, has no type for it.
        if is_shortage(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise PeerLost(f"{otherwise} ({reason})") from error


def summed(tensor: Tensor, group: Group) -> Tensor:
    """Its sum over the group, without a gradient."""
    if group.size == 1:
        return tensor
    total = tensor.detach().clone()
    group.sum_(total)
    return total


def part_sizes(n_rows: int, size: int) -> list[int]:
    """How many rows each of so many ranks has, as `tensor_split` deals them."""
    return [n_rows // size + (rank < n_rows % size) for rank in range(size)]


def own_part(tensor: Tensor, group: Group) -> Tensor:
    """This rank's rows of what all ranks have."""
    return tensor.tensor_split(group.size)[group.index] if group.size > 1 else tensor


def everybodys(part: Tensor, n: int, group: Group) -> Tensor:
    """All rows [n, ...], from each rank's `own_part`."""
    if group.size == 1:
        return part
    whole = part.new_empty(n, *part.shape[1:])
    own_part(whole, group).copy_(part)
    group.spread_parts_([whole])
    return whole


def part_summed(tensor: Tensor, group: Group) -> Tensor:
    """This rank's rows of the tensor's sum over the group: whatever follows is shared. A gradient goes to all rows."""
    return tensor if group.size == 1 else _PartSummed.apply(tensor, group)


class _PartSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.n_rows = group, len(tensor)
        # What was rounded to 16 bits is not added in 16 bits as well.
        total = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        group.sum_parts_([total])
        # Not a view, which would keep the others' memory.
        return own_part(total, group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return everybodys(grad, ctx.n_rows, ctx.group), None
