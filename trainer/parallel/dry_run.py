"""Tries a pass on every rank by itself, so that no rank waits for another one that fails in the middle of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from trainer.parallel.group import Group, own_part
from trainer.parallel.latents import Latents


class Echo(Group):
    """Stands in for a group: sends nothing, but allocates the memory that an exchange would take.

    The other ranks seem to have the lowest possible numbers, so that a top-k chooses only from this rank: the most that
    can ever be chosen from it.
    """

    def __init__(self, group: Group) -> None:
        self.size, self.index = group.size, group.index

    def gather(self, tensor: Tensor) -> Tensor:
        # A real transfer first receives the tensors of all ranks in a buffer of its own.
        return self._pad_with_lowest(tensor).clone()

    def to_owners(self, tensor: Tensor) -> Tensor:
        return self._pad_with_lowest(own_part(tensor, self))

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        """Return this rank's answers to itself in place of those of all owners; ones where this rank owns no rows.

        Bounds that other owners would tell seem to be the lowest possible too.
        """
        if tensor.is_floating_point():
            bounds = tensor.new_full((n_rows, *tensor.shape[2:]), -torch.inf)
            own_part(bounds, self).copy_(tensor[self.index])
            return bounds
        own = tensor[self.index] if tensor.shape[1] else tensor.new_ones(1, *tensor.shape[2:])
        return own[torch.arange(n_rows, device=own.device) % len(own)]

    def _pad_with_lowest(self, own: Tensor) -> Tensor:
        gathered = own.new_full((self.size, *own.shape), -torch.inf if own.is_floating_point() else 0)
        gathered[self.index] = own
        return gathered


class Shared(Protocol):
    """The part of an SAE that exchanges with other ranks."""

    data: Group
    peers: Group
    latents: Latents
    dead_after_tokens: int


@contextlib.contextmanager
def dry_run(sae: Shared) -> Iterator[None]:
    """Replace the groups of an SAE by echoes while the context lasts, and count all its latents as dead.

    Work on dead latents takes memory that would otherwise be needed only later in a run.
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
