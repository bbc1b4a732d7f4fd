"""A pass that every rank tries for itself, so that none waits for one that fails in the middle of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from trainer.parallel.group import Group, own_part
from trainer.parallel.latents import Latents


class Echo(Group):
    """In the place of a group: nothing is sent, and the memory of it is taken all the same.

    The others seem to have the lowest numbers there are, so that all that is chosen is this rank's: the most that ever
    can be.
    """

    def __init__(self, group: Group) -> None:
        self.size, self.index = group.size, group.index

    def gather(self, tensor: Tensor) -> Tensor:
        # A transfer has everybody's in one piece of its own first.
        return self._among_lowest(tensor).clone()

    def to_owners(self, tensor: Tensor) -> Tensor:
        return self._among_lowest(own_part(tensor, self))

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        """As if the others had decided on their rows like this one; that all is chosen, where it has none."""
        own = tensor[self.index] if tensor.shape[1] else tensor.new_ones(1, *tensor.shape[2:])
        return own[torch.arange(n_rows, device=own.device) % len(own)]

    def _among_lowest(self, own: Tensor) -> Tensor:
        found = own.new_full((self.size, *own.shape), -torch.inf if own.is_floating_point() else 0)
        found[self.index] = own
        return found


class Shared(Protocol):
    """An SAE, seen by what it exchanges with."""

    data: Group
    world: Group
    latents: Latents
    dead_after_tokens: int


@contextlib.contextmanager
def rehearsed(sae: Shared) -> Iterator[None]:
    """The SAE exchanges with echoes of its groups for as long as the context lasts, and all latents count as dead: what
    is done for them takes memory only later in a run."""
    real, dead_after_tokens = (sae.data, sae.world, sae.latents.group), sae.dead_after_tokens
    sae.data, sae.world, sae.latents.group = (_echo(group) for group in real)
    sae.dead_after_tokens = 0
    try:
        yield
    finally:
        sae.data, sae.world, sae.latents.group = real
        sae.dead_after_tokens = dead_after_tokens


def _echo(group: Group) -> Group:
    return Echo(group) if group.size > 1 else group
