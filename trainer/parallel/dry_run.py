"""Tries a pass on each rank without communication, so that no rank waits for one that runs out of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from trainer.parallel.group import Group, local_shard
from trainer.parallel.latents import Latents


class Echo(Group):
    """A substitute for a group that sends nothing but allocates as much memory as an exchange would.

    The other ranks appear to hold the lowest possible values. A top-k then selects only from this rank, which is its
    worst case.
    """

    def __init__(self, group: Group) -> None:
        self.size, self.index = group.size, group.index

    def gather(self, tensor: Tensor) -> Tensor:
        # Clone, since a real transfer receives the tensors of all ranks in a separate buffer.
        return self._pad_with_lowest(tensor).clone()

    def to_owners(self, tensor: Tensor) -> Tensor:
        return self._pad_with_lowest(local_shard(tensor, self))

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        """Repeat this rank's own answers in place of the other owners' answers; use ones if this rank owns no rows.

        Bounds from other owners also appear to be the lowest possible values.
        """
        if tensor.is_floating_point():
            bounds = tensor.new_full((n_rows, *tensor.shape[2:]), -torch.inf)
            local_shard(bounds, self).copy_(tensor[self.index])
            return bounds
        own = tensor[self.index] if tensor.shape[1] else tensor.new_ones(1, *tensor.shape[2:])
        return own[torch.arange(n_rows, device=own.device) % len(own)]

    def _pad_with_lowest(self, own: Tensor) -> Tensor:
        gathered = own.new_full((self.size, *own.shape), -torch.inf if own.is_floating_point() else 0)
        gathered[self.index] = own
        return gathered


class ExchangingPart(Protocol):
    """The part of an SAE that exchanges with other ranks."""

    data: Group
    peers: Group
    latents: Latents
    dead_after_tokens: int


@contextlib.contextmanager
def dry_run(sae: ExchangingPart) -> Iterator[None]:
    """Replace the groups of an SAE by echoes within the context, and treat all its latents as dead.

    Dead latents need extra memory, which would otherwise be allocated only later in a run.
    """
    real, dead_after_tokens = (sae.data, sae.peers, sae.latents.group), sae.dead_after_tokens
    sae.data, sae.peers, sae.latents.group = (_echo(group) for group in real)
    sae.dead_after_tokens = 0
    try:
        yield
    finally:
        sae.data, sae.peers, sae.latents.group = real
        sae.dead_after_tokens = dead_after_tokens


def _echo(group: Group) -> Group:
    return Echo(group) if group.size > 1 else group
