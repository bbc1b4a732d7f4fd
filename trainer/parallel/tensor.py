"""Every rank has the whole batch and some latents, with their share of the optimizer's state."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.contract.job import JobConfig
from trainer.parallel.grid import Grid


class TensorParallel(Grid):
    """Candidates for the largest activations and partial reconstructions are exchanged, gradients of weights never."""

    def __init__(self, rank: int, world_size: int, device: torch.device, rendezvous: Path, job: JobConfig) -> None:
        super().__init__(rank, world_size, device, rendezvous, n_latents=world_size)
