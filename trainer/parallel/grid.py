"""The modes `ddp`, `tensor` and `hybrid`, which arrange ranks in a grid."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.contract.planning.workload import Layout
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group
from trainer.parallel.process_group import World
from trainer.parallel.shares import Shares


class Grid(Parallel):
    """A grid of ranks: ranks in a row split the latents; ranks in a column have the same latents and split the tokens.

    `ddp` is a grid with one column: every rank has a full replica. `ddp` uses explicit all-reduces instead of
    DistributedDataParallel, because a sparse backward pass is too short to overlap with transfers. `tensor` is a grid
    with one row: every rank processes the complete batch; ranks exchange top-k candidates and partial reconstructions,
    but no weight gradients. `hybrid` has several rows and columns. Consecutive ranks split the latents, because ranks
    in a row exchange more often than ranks in a column, and consecutive ranks are on one machine.
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
    """Return this rank's row or column group; reuse the world group if it contains all ranks."""
    size = len(parts[0])
    if size in (1, world.size):
        return world.group if size > 1 else Group()
    return world.part(parts)
