"""Ranks in a grid, which is what all modes with several of them are."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.contract.job import JobConfig
from trainer.parallel.balance import Shares
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group, peers_expected
from trainer.parallel.world import World, ranks_of


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
            data=_ranks(mesh, "data", world),
            latents=_ranks(mesh, "latents", world),
            world=world.group,
            waiting=world.waiting,
            shares=shares,
            sends_bf16=job.parallel.gradients == "bf16",
        )


def _ranks(mesh: DeviceMesh, axis: str, world: World) -> Group:
    """Of this row or column; where it is all there is, it needs no connections of its own."""
    size = mesh[axis].size()
    if size in (1, world.size):
        return world.group if size > 1 else Group()
    assert world.waiting is not None
    return ranks_of(mesh.get_group(axis), world.device, world.waiting)
