"""A full replica on every rank; gradients are summed over ranks once per step."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.contract.job import JobConfig
from trainer.parallel.grid import Grid


class Ddp(Grid):
    """Explicit sums rather than DistributedDataParallel: a sparse backward pass is too short to hide transfers in."""

    def __init__(self, rank: int, world_size: int, device: torch.device, rendezvous: Path, job: JobConfig) -> None:
        super().__init__(rank, world_size, device, rendezvous, n_latents=1)
