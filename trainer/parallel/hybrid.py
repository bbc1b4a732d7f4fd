"""Ranks in a grid: those of a row share the latents, those of a column the tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.contract.job import JobConfig
from trainer.parallel.grid import Grid


class Hybrid(Grid):
    """`ddp` over groups of ranks, each of which is `tensor`."""

    def __init__(self, rank: int, world_size: int, device: torch.device, rendezvous: Path, job: JobConfig) -> None:
        super().__init__(rank, world_size, device, rendezvous, n_latents=job.latent_ranks(world_size))
