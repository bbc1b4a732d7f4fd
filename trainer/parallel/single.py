"""One process, one device: nothing crosses a wire."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.contract.job import JobConfig
from trainer.parallel.base import Parallel


class Single(Parallel):
    """The null form."""

    def __init__(self, rank: int, world_size: int, device: torch.device, rendezvous: Path, job: JobConfig) -> None:
        super().__init__(device)
