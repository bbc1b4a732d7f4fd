"""One process, one device: nothing crosses a wire."""

from __future__ import annotations

from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.process_group import World
from trainer.parallel.shares import Shares


class Single(Parallel):
    """The null form."""

    def __init__(self, world: World, job: JobConfig, shares: Shares) -> None:
        super().__init__(world.device)
