"""Ranks in a grid, which is what all modes with several of them are."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trainer.contract.job import JobConfig
from trainer.parallel.balance import Shares
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group, Ranks, peers_expected
from trainer.parallel.waiting import Waiting
from trainer.parallel.world import World


class Grid(Parallel):
    """Ranks of a row share the latents; those of a column have the same latents and more tokens.

    Neighbours share latents, since that exchange is the larger one and neighbours are on one machine.
    """

    def __init__(self, world: World, job: JobConfig, shares: Shares) -> None:
        n_latents = job.latent_ranks(world.size)
        shape = (world.size // n_latents, n_latents)
        assert world.waiting is not None
        with peers_expected("the ranks could not find each other"):
            mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("data", "latents"))
        super().__init__(
            world.device,
            data=_ranks(mesh.get_group("data"), shape[0], world.waiting),
            latents=_ranks(mesh.get_group("latents"), shape[1], world.waiting),
            world=world.group,
            waiting=world.waiting,
            shares=shares,
            sends_bf16=job.parallel.gradients == "bf16",
        )


def _ranks(group: dist.ProcessGroup, size: int, time: Waiting) -> Group:
    return Ranks(group, time) if size > 1 else Group()
