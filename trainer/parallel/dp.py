"""Data-parallel replicas on several devices of one process: no process group, and one interpreter for all of them."""

from __future__ import annotations

from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.process_group import World
from trainer.parallel.shares import Shares


class DataParallel(Parallel):
    """`ddp` by threads; slower, since Python runs only one thread at a time."""

    def __init__(self, world: World, job: JobConfig, shares: Shares) -> None:
        super().__init__(
            world.device,
            data=world.group,
            world=world.group,
            waiting=world.waiting,
            shares=shares,
            sends_bf16=job.parallel.gradients == "bf16",
        )
