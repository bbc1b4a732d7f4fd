"""One process, one device: nothing crosses a wire."""

from __future__ import annotations

from trainer.contract.job import JobConfig
from trainer.parallel.balance import Shares
from trainer.parallel.base import Parallel
from trainer.parallel.world import World


class Single(Parallel):
    """The null form."""

    def __init__(self, world: World, job: JobConfig, shares: Shares) -> None:
        super().__init__(world.device)
