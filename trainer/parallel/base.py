"""The base of all parallel modes: a grid of ranks, of which one row or column may have length 1."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.parallel.group import Group, own_part, split_by
from trainer.parallel.shares import Shares, even
from trainer.parallel.stop_flags import Wishes, wishes_reader
from trainer.parallel.totals import Totals
from trainer.parallel.waiting import HostWaits, Waiting, Waits


class StepSums(NamedTuple):
    """The tensors that are added up at the end of a step.

    `of_latents` are summed over the ranks with the same latents, and so are `dealt`, of which each rank gets only its
    part of the rows; `of_all` are summed over all ranks.
    """

    of_latents: list[Tensor]
    dealt: list[Tensor]
    of_all: list[Tensor]

    @classmethod
    def concatenate(cls, several: Iterable[StepSums]) -> StepSums:
        """Return the concatenation of several, list by list."""
        return cls(*(list(itertools.chain(*alike)) for alike in zip(*several, strict=True)))


class Parallel:
    """The ranks of one run, seen from one of them. This class is the mode of a single rank.

    Ranks of `data` hold the same latents and have tokens of their own; ranks of `latents` have the same tokens and
    hold latents of their own; `world` is all of them.
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
        # The largest share of all latents that each rank has memory for, where that is known.
        self.room: list[float] | None = None
        # The largest part of a micro-batch that a rank has memory for, where that is known.
        self.most_tokens: int | None = None
        # Whether each rank of `latents` reads a part of their stored rows, and gets the other parts from the others.
        self.reads_parts = False

    @property
    def rank(self) -> int:
        return self.world.index

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def learns_alone(self) -> bool:
        """Whether no other rank holds a part of an SAE of this one."""
        return self.world_size == 1

    @property
    def peers(self) -> Group:
        """The ranks that learn the same SAEs."""
        return Group() if self.learns_alone else self.world

    def neighbours_with_these_tokens(self) -> Group:
        """Connect the ranks that have the same tokens as this one, if all are on one machine; all ranks call it alike.

        They exchange tensors on the CPU, and may do so in a thread of their own.
        """
        return Group()

    @property
    def is_main(self) -> bool:
        """Whether this rank writes checkpoints, metrics and the SAE."""
        return self.rank == 0

    def sum_step_(self, several: Iterable[StepSums], wishes: tuple[bool, ...]) -> tuple[bool, ...]:
        """Add up the sums of all SAEs at the end of a step, and return for each wish whether any rank has it."""
        if self.world_size == 1:
            return wishes
        # Filled on the device, since a copy from the host would wait.
        wanted = torch.stack([torch.full((), float(wish), device=self.device) for wish in wishes])
        sums = StepSums.concatenate(several)
        # Vectors are summed whole, with all else that is small.
        vectors, matrices = split_by(lambda tensor: tensor.dim() < 2, sums.dealt)
        of_world = [*([] if self.learns_alone else sums.of_all), wanted]
        with self._as_sent(sums.of_latents) as sent, self._as_sent(matrices, are_parts=True) as sent_parts:
            of_latents = [*sent, *vectors]
            if self.data is self.world:
                of_latents, of_world = [], of_latents + of_world
            transfers = self.data.start_sums(of_latents)
            self.data.sum_parts_(sent_parts)
            self.world.finish([*transfers, *self.world.start_sums(of_world)])
        return self._wishes.read(wanted)

    @contextlib.contextmanager
    def _as_sent(self, tensors: list[Tensor], *, are_parts: bool = False) -> Iterator[list[Tensor]]:
        """Yield the tensors to send, matrices in bfloat16 if the job says so, and copy their sums back into `tensors`.

        Vectors are sent as they are, since they hardly cost anything. Of sums that `are_parts` only the rows of this
        rank are copied: the others are undefined.
        """
        sent = [self.as_sent(tensor) for tensor in tensors]
        yield sent
        for tensor, total in zip(tensors, sent, strict=True):
            if total is not tensor:
                own, of_total = (own_part(one, self.data) if are_parts else one for one in (tensor, total))
                own.copy_(of_total)

    def as_sent(self, tensor: Tensor) -> Tensor:
        """Return a gradient as replicas exchange it: a matrix in bfloat16 if the job says so."""
        is_narrow = self.sends_bf16 and self.data.size > 1 and tensor.dim() == 2
        return tensor.bfloat16() if is_narrow else tensor

    @cached_property
    def _wishes(self) -> Wishes:
        return wishes_reader(self.device)

    def sum_parts(self, parts: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
        """Add vectors over a group in a single exchange and return them on the CPU."""
        return self.totals(parts, group).read()

    def totals(self, parts: Mapping[str, Tensor], group: Group) -> Totals:
        """Begin to add vectors, all on the device or all on the CPU, over a group in a single exchange."""
        return Totals(parts, group, self.device)

    def everybodys(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return the values that all ranks have, by the label of an SAE, where each rank knows only its own SAEs.

        The values have to be plain ones that msgpack can encode.
        """
        return own

    def collect(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return, on rank 0, the tensors of the SAEs of all ranks, where each rank has its own."""
        return tensors

    def slot(self, value: float) -> Tensor:
        """Return a vector [world_size] on the CPU that is `value` at this rank and 0 elsewhere.

        Its sum over the ranks holds the value of every rank.
        """
        values = torch.zeros(self.world_size, dtype=torch.float64)
        values[self.rank] = value
        return values

    def take_waits(self) -> Waits:
        """Return how long this process has waited for other ranks since the last call, to be read later."""
        return self._waiting.take() if self._waiting else HostWaits()
