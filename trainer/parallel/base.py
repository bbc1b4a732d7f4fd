"""The base class for all parallel modes: a grid of ranks, possibly with a single row or column."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.parallel.group import Group, local_shard, split_by
from trainer.parallel.shares import Shares, even
from trainer.parallel.totals import Totals
from trainer.parallel.waiting import HostWaits, Waiting, Waits


class StepSums(NamedTuple):
    """The tensors to reduce over ranks at the end of a step.

    `of_latents` are all-reduced over the ranks with the same latents. `sharded` are reduce-scattered over the ranks
    with the same latents: each rank gets only the sums for its rows. `of_all` are all-reduced over all ranks.
    """

    of_latents: list[Tensor]
    sharded: list[Tensor]
    of_all: list[Tensor]

    @classmethod
    def concatenate(cls, several: Iterable[StepSums]) -> StepSums:
        """Concatenate several `StepSums`, field by field."""
        return cls(*(list(itertools.chain(*alike)) for alike in zip(*several, strict=True)))


class Parallel:
    """A run's ranks, as seen by one rank. This base class is the mode for a single rank.

    Ranks in `data` have the same latents but process different tokens. Ranks in `latents` process the same tokens but
    have different latents. `world` contains all ranks.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        data: Group | None = None,
        latents: Group | None = None,
        world: Group | None = None,
        waiting: Waiting | None = None,
        shares: Shares | None = None,
        sends_bf16: bool = False,
    ) -> None:
        self.device, self._waiting = device, waiting
        self.data, self.latents, self.world = data or Group(), latents or Group(), world or Group()
        self.shares = shares or even(self.data.size, self.latents.size)
        self.sends_bf16 = sends_bf16
        # The largest fraction of all latents that fits into each rank's memory, if known.
        self.capacity: list[float] | None = None
        # The largest micro-batch, in tokens, that fits into a rank's memory, if known.
        self.most_tokens: int | None = None
        # Whether each rank in `latents` reads only a share of the stored rows and receives the rest from the other
        # ranks.
        self.reads_parts = False

    @property
    def rank(self) -> int:
        return self.world.index

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def learns_alone(self) -> bool:
        """Whether no other rank trains this rank's SAEs."""
        return self.world_size == 1

    @property
    def peers(self) -> Group:
        """The ranks that train the same SAEs."""
        return Group() if self.learns_alone else self.world

    def neighbours_with_these_tokens(self) -> Group:
        """Connect the ranks that process the same tokens, if they are on one machine; call this on all ranks.

        The group exchanges CPU tensors and may be used from a separate thread.
        """
        return Group()

    @property
    def is_main(self) -> bool:
        """Whether this rank writes checkpoints, metrics and the SAE."""
        return self.rank == 0

    def sum_step_(self, several: Iterable[StepSums], requests: tuple[bool, ...]) -> tuple[bool, ...]:
        """Reduce the `StepSums` of all SAEs at the end of a step, and return which requests any rank has made."""
        if self.world_size == 1:
            return requests
        # Create the tensor on the device, because a copy from the host would synchronise.
        wanted = torch.stack([torch.full((), float(request), device=self.device) for request in requests])
        sums = StepSums.concatenate(several)
        # Vectors are small, so all-reduce them in the same exchange as the other small tensors.
        vectors, matrices = split_by(lambda tensor: tensor.dim() < 2, sums.sharded)
        of_world = [*([] if self.learns_alone else sums.of_all), wanted]
        with self._as_sent(sums.of_latents) as sent, self._as_sent(matrices, are_parts=True) as sent_parts:
            of_latents = [*sent, *vectors]
            if self.data is self.world:
                of_latents, of_world = [], of_latents + of_world
            transfers = self.data.start_sums(of_latents)
            self.data.sum_parts_(sent_parts)
            self.world.finish([*transfers, *self.world.start_sums(of_world)])
        return self._requests.read(wanted)

    @contextlib.contextmanager
    def _as_sent(self, tensors: list[Tensor], *, are_parts: bool = False) -> Iterator[list[Tensor]]:
        """Yield the tensors to send, with matrices in bfloat16 if so configured, and copy the sums back into `tensors`.

        Vectors keep their dtype because they are cheap to send. With `are_parts`, only this rank's rows are copied
        back; the other rows are undefined.
        """
        sent = [self.as_sent(tensor) for tensor in tensors]
        yield sent
        for tensor, total in zip(tensors, sent, strict=True):
            if total is not tensor:
                own, of_total = (local_shard(one, self.data) if are_parts else one for one in (tensor, total))
                own.copy_(of_total)

    def as_sent(self, tensor: Tensor) -> Tensor:
        """Return a gradient in the dtype that replicas exchange: bfloat16 for matrices if so configured."""
        is_narrow = self.sends_bf16 and self.data.size > 1 and tensor.dim() == 2
        return tensor.bfloat16() if is_narrow else tensor

    @cached_property
    def _requests(self) -> RequestReader:
        return requests_reader(self.device)

    def sum_parts(self, parts: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
        """Sum vectors over a group in one exchange and return the sums on the CPU."""
        return self.totals(parts, group).read()

    def totals(self, parts: Mapping[str, Tensor], group: Group) -> Totals:
        """Start summing vectors over a group in one exchange; all vectors must be on the device, or all on the CPU."""
        return Totals(parts, group, self.device)

    def all_gather(self, own: dict[str, Any]) -> dict[str, Any]:
        """All-gather values keyed by SAE label; each rank passes the values for its own SAEs.

        msgpack must be able to encode the values.
        """
        return own

    def collect(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather the tensors for all ranks' SAEs on rank 0."""
        return tensors

    def slot(self, value: float) -> Tensor:
        """Return a vector [world_size] on the CPU that is `value` at this rank's index and 0 elsewhere.

        The sum of these vectors over all ranks contains every rank's value.
        """
        values = torch.zeros(self.world_size, dtype=torch.float64)
        values[self.rank] = value
        return values

    def take_waits(self) -> Waits:
        """Return a handle for the time this process has spent waiting for other ranks since the last call."""
        return self._waiting.take() if self._waiting else HostWaits()


class RequestReader(Protocol):
    """Reads summed flags; the result is the same on all ranks because it depends only on the sums."""

    def read(self, total: Tensor) -> tuple[bool, ...]:
        """Return, for each of n requests, whether any rank has made it; `total` [n] contains the sums for this step."""


class HostRequests:
    """Reads sums in host memory; they are available as soon as the exchange is done."""

    def read(self, total: Tensor) -> tuple[bool, ...]:
        return tuple(total.bool().tolist())


class CudaRequests:
    """Reads the sums from the previous step, which have arrived by now; the host does not wait for a copy."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._step = 0

    def read(self, total: Tensor) -> tuple[bool, ...]:
        if not self._copies:
            self._copies = [torch.zeros(len(total), pin_memory=True) for _ in range(2)]
        now, before = self._step % 2, (self._step + 1) % 2
        self._copies[now].copy_(total, non_blocking=True)
        self._copied[now].record()
        self._step += 1
        # In the first step, the event `before` was never recorded, so CUDA treats it as complete, and its copy is 0.
        self._copied[before].synchronize()
        return tuple(self._copies[before].bool().tolist())


def requests_reader(device: torch.device) -> RequestReader:
    """Return the request reader for a device."""
    return CudaRequests() if device.type == "cuda" else HostRequests()
