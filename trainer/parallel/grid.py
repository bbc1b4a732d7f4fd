"""Ranks in a grid, the form of all modes with several processes."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.contract.planning.workload import Layout
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group
from trainer.parallel.process_group import World
from trainer.parallel.shares import Shares


class Grid(Parallel):
    """Ranks of a row share the latents; those of a column have the same latents and more tokens.

    `ddp` is a grid of one column: a full replica on every rank, with explicit sums rather than DistributedDataParallel,
    since a sparse backward pass is too short to hide transfers in. `tensor` is a grid of one row: every rank has the
    whole batch and exchanges candidates for the largest activations and partial reconstructions, gradients of weights
    never. `hybrid` has several of both. Neighbours share latents, since that exchange is the larger one and neighbours
    are on one machine.
    """

    def __init__(self, world: World, job: JobConfig, shares: Shares) -> None:
        n_latents = Layout(job, world.size).latent_ranks
        rows = [range(begin, begin + n_latents) for begin in range(0, world.size, n_latents)]
        columns = [range(begin, world.size, n_latents) for begin in range(n_latents)]
        super().__init__(
            world.device,
            data=_ranks(columns, world),
            latents=_ranks(rows, world),
            world=world.group,
            waiting=world.waiting,
            shares=shares,
            sends_bf16=job.parallel.gradients == "bf16",
        )
        self._all, self._rows = world, rows

    def neighbours_with_these_tokens(self) -> Group:
        return self._all.neighbours(self._rows) if len(self._rows[0]) > 1 else Group()


def _ranks(parts: Sequence[Sequence[int]], world: World) -> Group:
    """Return this rank's group of a row or column; one that holds all ranks needs no connections of its own."""
    size = len(parts[0])
    if size in (1, world.size):
        return world.group if size > 1 else Group()
    return world.part(parts)
