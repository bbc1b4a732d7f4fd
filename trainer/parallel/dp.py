"""Data-parallel replicas on several devices in one process, without a process group."""

from __future__ import annotations

from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.process_group import World
from trainer.parallel.shares import Shares


class DataParallel(Parallel):
    """Like `ddp`, but with threads instead of processes; this is slower, because Python runs one thread at a time."""

    def __init__(self, world: World, job: JobConfig, shares: Shares) -> None:
        super().__init__(
            world.device,
            data=world.group,
            world=world.group,
            waiting=world.waiting,
            shares=shares,
            sends_bf16=job.parallel.gradients == "bf16",
        )
