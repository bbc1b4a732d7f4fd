"""Groups of ranks that exchange tensors. A group of one rank does nothing, so callers need not check the size."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.parallel.waiting import Waiting
from trainer.runtime.out_of_memory import is_shortage

# Tensors with fewer values than this are packed into one tensor. On a GPU, copying 4 MB twice takes a tenth of an
# all-reduce's start-up time.
SMALL = 2**20

_coalescing: Any = dist.distributed_c10d._coalescing_manager
# torch 2.13 renamed reduce-scatter and all-gather.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


LOST, FAILED = "the connection to another rank was lost", "an exchange with other ranks failed"
# Matches NCCL errors caused by another rank or the network.
_OF_PEERS = r"remote process|system error"


class PeerLost(UserError):
    """Raised when this rank cannot continue because another rank has exited."""


class Group:
    """A group of one rank: sums and gathers leave tensors unchanged."""

    size, index = 1, 0
    # Whether all ranks are on one machine and exchange tensors through its memory.
    is_on_one_machine = True
    # The number of bytes sent to other ranks since the start, or None if the communication library does not report it.
    sent_bytes: int | None = 0

    def leave(self) -> None:
        """Free what the group needs, once no rank uses it any longer; call this on all its ranks."""

    def start_sums(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Start replacing every tensor with its sum over the group; return the transfers to pass to `finish`."""
        return []

    def finish(self, transfers: list[Any]) -> None:
        """Wait until transfers are complete; raise `PeerLost` if another rank has exited."""

    def sum_(self, *tensors: Tensor) -> None:
        """Replace every tensor with its sum over the group."""
        self.finish(self.start_sums(tensors))

    def sum_parts_(self, tensors: Iterable[Tensor]) -> None:
        """Replace this rank's rows of every tensor with their sum over the group; the other rows become undefined.

        Rows are split across ranks along the first dimension, as with `tensor_split`.
        """

    def start_sum_parts(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Start `sum_parts_` and return the transfers to pass to `finish`."""
        self.sum_parts_(tensors)
        return []

    def part_of_sum(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of the sum over the group, split as in `sum_parts_`; leave `tensor` unchanged.

        16-bit values are summed in fp32.
        """
        total = wide(tensor, copy=True)
        self.sum_parts_([total])
        # Clone the rows, because a view would keep the memory for all rows allocated.
        return local_shard(total, self).clone()

    def start_part_of_sum(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """Start `part_of_sum`; return its result, and the transfers that must finish before the result is valid."""
        return self.part_of_sum(tensor), []

    def spread_parts_(self, tensors: Iterable[Tensor]) -> None:
        """All-gather in place: receive the rows that other ranks own; rows are split as in `sum_parts_`."""

    def start_spread(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Start `spread_parts_` and return the transfers to pass to `finish`."""
        self.spread_parts_(tensors)
        return []

    def gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, which must have the same shape, as [size, ...]."""
        return tensor[None]

    def start_gather(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """Start `gather`; return the output tensor and the transfers to pass to `finish`."""
        return self.gather(tensor), []

    def to_owners(self, tensor: Tensor) -> Tensor:
        """Return every rank's version of this rank's rows, [size, n_own, ...]; `tensor` contains all rows."""
        return tensor[None]

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        """Return rows [n_rows, ...], each from its owner.

        `tensor` [size, n_own, ...] contains the rows that this rank has computed for every rank, in the layout of
        `to_owners`.
        """
        return tensor[0]

    def copy_from_first_(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast every tensor from the group's first rank, in place."""

    def send_to_first(self, tensor: Tensor) -> None:
        """Send a tensor to the first rank, which calls `receive_from`."""

    def receive_from(self, rank: int, into: Tensor) -> Tensor:
        """Receive the next tensor from `rank` into `into` and return it; call this only on the first rank."""
        return into

    def collect(self, tensor: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
        """On the first rank, return all ranks' tensors on the CPU; on other ranks, return an empty list.

        `sizes` are the lengths of the ranks' tensors along `dim`.
        """
        return [tensor.cpu()]


class Processes(Group):
    """A group of several ranks, one process per rank."""

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
        return [tensor.cpu(), *(self._receive(tensor, sizes[rank], dim, rank) for rank in range(1, self.size))]

    def _receive(self, like: Tensor, size: int, dim: int, rank: int) -> Tensor:
        shape = list(like.shape)
        shape[dim] = size
        return self.receive_from(rank, like.new_empty(shape)).cpu()


class DistributedGroup(Processes):
    """A group of processes, on one or more machines, using `torch.distributed` collectives."""

    sent_bytes: int | None = None
    is_on_one_machine = False

    def __init__(self, group: dist.ProcessGroup | None, waiting: Waiting) -> None:
        super().__init__(dist.get_world_size(group), dist.get_rank(group), waiting)
        self._group = dist.group.WORLD if group is None else group

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._group

    def leave(self) -> None:
        """Disconnect from the other ranks of this group, which must not be the group of all ranks."""
        dist.destroy_process_group(self._group)

    def start_sums(self, tensors: Iterable[Tensor]) -> list[Any]:
        small, large = split_by(lambda tensor: tensor.numel() < SMALL, tensors)
        with exchanging(self._waiting):
            transfers: list[Any] = [_PackedSum(pack, self._start_sum(pack.flat)) for pack in packs(small)]
            return [*transfers, *(self._start_sum(dense(tensor)) for tensor in large)]

    def _start_sum(self, tensor: Tensor) -> Any:
        return dist.all_reduce(tensor, group=self._group, async_op=True)

    def sum_parts_(self, tensors: Iterable[Tensor]) -> None:
        even, others = split_by(self._adds_parts, tensors)
        with exchanging(self._waiting):
            with self._at_once(even):
                for tensor in even:
                    _reduce_scatter(tensor.tensor_split(self.size)[self.index], tensor, group=self._group)
            for tensor in others:
                dist.all_reduce(tensor, group=self._group)

    def start_sum_parts(self, tensors: Iterable[Tensor]) -> list[Any]:
        even, others = split_by(self._adds_parts, tensors)
        with exchanging(self._waiting):
            sums = [
                _reduce_scatter(tensor.tensor_split(self.size)[self.index], tensor, group=self._group, async_op=True)
                for tensor in even
            ]
            return [*sums, *map(self._start_sum, others)]

    def part_of_sum(self, tensor: Tensor) -> Tensor:
        own, transfers = self.start_part_of_sum(tensor)
        self.finish(transfers)
        return own

    def start_part_of_sum(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        if not self._adds_parts(tensor):
            return super().part_of_sum(tensor), []
        whole = tensor.contiguous()
        own = whole.new_empty(len(whole) // self.size, *whole.shape[1:], dtype=wide_dtype(whole))
        if whole.dtype == own.dtype:
            with exchanging(self._waiting):
                return own, [_reduce_scatter(own, whole, group=self._group, async_op=True)]
        # A reduce-scatter would also round its sums to 16 bits; received parts can be summed in fp32.
        parts = whole.new_empty(self.size, *own.shape)
        with exchanging(self._waiting):
            transfer = dist.all_to_all_single(parts.flatten(0, 1), whole, group=self._group, async_op=True)
        return own, [_SumOfParts(own, parts, transfer)]

    def spread_parts_(self, tensors: Iterable[Tensor]) -> None:
        even, others = split_by(self._has_even_parts, tensors)
        with exchanging(self._waiting):
            with self._at_once(even):
                for tensor in of_one_type(even):
                    _all_gather(tensor, tensor.tensor_split(self.size)[self.index], group=self._group)
            for tensor in others:
                for rank, part in enumerate(tensor.tensor_split(self.size)):
                    dist.broadcast(part, group=self._group, group_src=rank)

    def start_spread(self, tensors: Iterable[Tensor]) -> list[Any]:
        even, others = split_by(self._has_even_parts, tensors)
        self.spread_parts_(others)
        with exchanging(self._waiting):
            return [
                _all_gather(tensor, tensor.tensor_split(self.size)[self.index], group=self._group, async_op=True)
                for tensor in even
            ]

    def _has_even_parts(self, tensor: Tensor) -> bool:
        return len(tensor) % self.size == 0

    def _adds_parts(self, tensor: Tensor) -> bool:
        """Return whether reduce-scatter can be used; it requires equal parts, and some gloo versions lack it."""
        return tensor.is_cuda and self._has_even_parts(tensor)

    def _at_once(self, tensors: list[Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Coalesce the GPU transfers started in the `with` block for the given tensors."""
        is_worth_it = len(tensors) > 1 and tensors[0].is_cuda
        return _coalescing(self._group) if is_worth_it else contextlib.nullcontext()

    def gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty(self.size, *tensor.shape)
        with exchanging(self._waiting):
            _all_gather(gathered.view(-1), tensor.contiguous().view(-1), group=self._group)
        return gathered

    def start_gather(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        gathered = tensor.new_empty(self.size, *tensor.shape)
        with exchanging(self._waiting):
            own = tensor.contiguous().view(-1)
            return gathered, [_all_gather(gathered.view(-1), own, group=self._group, async_op=True)]

    def to_owners(self, tensor: Tensor) -> Tensor:
        sizes = part_sizes(len(tensor), self.size)
        own_rows = tensor.new_empty(self.size, sizes[self.index], *tensor.shape[1:])
        with exchanging(self._waiting):
            dist.all_to_all_single(
                own_rows.flatten(0, 1), tensor.contiguous(), [sizes[self.index]] * self.size, sizes, group=self._group
            )
        return own_rows

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        rows, sizes = tensor.new_empty(n_rows, *tensor.shape[2:]), part_sizes(n_rows, self.size)
        with exchanging(self._waiting):
            dist.all_to_all_single(
                rows, tensor.flatten(0, 1).contiguous(), sizes, [sizes[self.index]] * self.size, group=self._group
            )
        return rows

    def copy_from_first_(self, tensors: Iterable[Tensor]) -> None:
        with exchanging(self._waiting):
            for tensor in tensors:
                dist.broadcast(dense(tensor), group=self._group, group_src=0)

    def send_to_first(self, tensor: Tensor) -> None:
        with exchanging(self._waiting):
            dist.send(tensor.contiguous(), group=self._group, group_dst=0)

    def receive_from(self, rank: int, into: Tensor) -> Tensor:
        with exchanging(self._waiting):
            dist.recv(into, group=self._group, group_src=rank)
        return into


class Pack(NamedTuple):
    """Tensors with the same dtype, and their concatenation, `flat`."""

    flat: Tensor
    tensors: list[Tensor]

    def unpack(self) -> None:
        """Copy the current values of `flat` back into the tensors."""
        parts = self.flat.split([tensor.numel() for tensor in self.tensors])
        torch._foreach_copy_(
            self.tensors, [part.view_as(tensor) for part, tensor in zip(parts, self.tensors, strict=True)]
        )


def packs(tensors: Iterable[Tensor]) -> list[Pack]:
    """Concatenate the tensors of each dtype into one tensor."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    return [Pack(torch.cat([tensor.reshape(-1) for tensor in alike]), alike) for alike in by_type.values()]


def split_by(test: Callable[[Tensor], bool], tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that pass a test, and the rest."""
    passing: list[Tensor] = []
    others: list[Tensor] = []
    for tensor in tensors:
        (passing if test(tensor) else others).append(tensor)
    return passing, others


class _PackedSum(NamedTuple):
    """An all-reduce of several small tensors packed into one."""

    pack: Pack
    transfer: Any

    def wait(self) -> None:
        self.transfer.wait()
        self.pack.unpack()


class _SumOfParts(NamedTuple):
    """A transfer of all ranks' parts [size, n_own, ...], and the output buffer for their sum [n_own, ...]."""

    own: Tensor
    parts: Tensor
    transfer: Any

    def wait(self) -> None:
        self.transfer.wait()
        torch.sum(self.parts, 0, dtype=self.own.dtype, out=self.own)


def of_one_type(tensors: list[Tensor]) -> list[Tensor]:
    """View contiguous tensors as bytes if their dtypes differ, because coalesced transfers need a single dtype."""
    is_needed = len({tensor.dtype for tensor in tensors}) > 1
    return [tensor.view(torch.uint8) for tensor in tensors] if is_needed else tensors


def dense(tensor: Tensor) -> Tensor:
    """Return a contiguous view of a tensor, as transfers require; a column-major matrix is transposed for this."""
    return tensor.T if tensor.dim() == 2 and not tensor.is_contiguous() else tensor


@contextlib.contextmanager
def exchanging(waiting: Waiting) -> Iterator[None]:
    """Count the time spent in the `with` block as waiting time; raise `PeerLost` if an exchange fails."""
    with peers_expected(LOST), waiting.measure():
        yield


@contextlib.contextmanager
def peers_expected(otherwise: str) -> Iterator[None]:
    """Convert a failed exchange to `PeerLost` with the message `otherwise`, unless memory has run out.

    If NCCL itself fails on this rank, no connection was lost, so the message starts with `FAILED` instead.
    """
    try:
        yield
    except RuntimeError as error:  # includes dist.DistError
        # NCCL allocates memory itself and has no error type for out-of-memory errors.
        if is_shortage(error):
            raise
        reason = _reason(str(error))
        fails_here = otherwise == LOST and "NCCL error" in reason and not re.search(_OF_PEERS, reason)
        raise PeerLost(f"{FAILED if fails_here else otherwise} ({reason})") from error


def _reason(words: str) -> str:
    """Return the first line of an error and the cause that NCCL appends after `Last error:`."""
    first, _, rest = words.strip().partition("\n")
    cause = rest.partition("Last error:")[2].strip().partition("\n")[0]
    return f"{first}: {cause}" if cause else first


def wide(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """Convert a tensor to the dtype for sums: fp32, or its own dtype if that is wider."""
    return tensor.to(wide_dtype(tensor), copy=copy)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def part_dtype(read_in: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which ranks send parts of a sum whose gradient they gather in `read_in`; None: fp32 or wider.

    Ranks send bfloat16 only if the products' factors were rounded to bfloat16 as well, since the errors have the same
    size. float16 could overflow.
    """
    return read_in if read_in == torch.bfloat16 else None


def sum_of(tensor: Tensor, group: Group) -> Tensor:
    """Return a tensor's sum over the group, without a gradient."""
    if group.size == 1:
        return tensor
    total = tensor.detach().clone()
    group.sum_(total)
    return total


def gather_bytes(group: Group, own: bytes, device: torch.device) -> list[bytes]:
    """All-gather byte strings of different lengths, as tensors on `device`."""
    sizes = group.gather(torch.tensor([len(own)], dtype=torch.int64, device=device)).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    gathered = group.gather(padded.to(device)).cpu()
    return [bytes(part[:size].tolist()) for part, size in zip(gathered, sizes, strict=True)]


def gather_rows(group: Group, own: Tensor, *, is_there: bool = True) -> list[Tensor]:
    """Return, on every rank, the rows [n, d] from all ranks that set `is_there`; n may differ between ranks."""
    n_rows = group.gather(torch.tensor([len(own) if is_there else -1])).flatten().tolist()
    padded = own.new_zeros(max(0, *n_rows), *own.shape[1:])
    padded[: len(own)] = own
    return [rows[:n] for rows, n in zip(group.gather(padded), n_rows, strict=True) if n >= 0]


def part_sizes(n_rows: int, size: int) -> list[int]:
    """Return the number of rows that each of `size` ranks owns if rows are split as with `tensor_split`."""
    return [n_rows // size + (rank < n_rows % size) for rank in range(size)]


def local_shard(tensor: Tensor, group: Group) -> Tensor:
    """Return this rank's shard of a tensor that contains all ranks' rows."""
    return tensor.tensor_split(group.size)[group.index] if group.size > 1 else tensor


def all_gather(part: Tensor, n: int, group: Group, dtype: torch.dtype | None = None) -> Tensor:
    """All-gather rows [n, ...] from the ranks that own them; `part` is this rank's `local_shard`.

    The rows are sent and returned in `dtype`, by default the dtype of `part`.
    """
    if group.size == 1:
        return part if dtype is None else part.to(dtype)
    whole = part.new_empty(n, *part.shape[1:], dtype=dtype or part.dtype)
    local_shard(whole, group).copy_(part)
    group.spread_parts_([whole])
    return whole


def reduce_scatter(tensor: Tensor, group: Group, read_in: torch.dtype | None = None) -> Tensor:
    """Reduce-scatter: return this rank's rows of the sum over the group; ranks can then share later work on the rows.

    The backward pass all-gathers the gradient in the dtype `read_in`, by default the gradient's own dtype. Ranks send
    in `part_dtype(read_in)`, not in the dtype of `tensor`, because their dtypes may differ: each rank chooses a dense
    16-bit or a sparse 32-bit matmul, depending on its number of active latents. The dtype `read_in` must be the same on
    all ranks.
    """
    if group.size == 1:
        return tensor
    summed: Tensor = _PartSummed.apply(tensor, group, read_in)  # type: ignore[no-untyped-call]
    return summed


class _PartSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, read_in: torch.dtype | None) -> Tensor:
        ctx.group, ctx.n_rows, ctx.read_in = group, len(tensor), read_in
        return group.part_of_sum(wide(tensor) if (sent := part_dtype(read_in)) is None else tensor.to(sent))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.n_rows, ctx.group, ctx.read_in), None, None
