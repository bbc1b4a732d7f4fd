"""One process on one device, with no communication."""

from __future__ import annotations

from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.process_group import World
from trainer.parallel.shares import Shares


class Single(Parallel):
    """The mode for one process: a group of one rank."""

    def __init__(self, world: World, job: JobConfig, shares: Shares) -> None:
        super().__init__(world.device)
