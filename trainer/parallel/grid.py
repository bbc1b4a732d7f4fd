"""Ranks as processes that find each other: what all modes with several of them share."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trainer.parallel.base import Parallel
from trainer.parallel.group import Group, Ranks, peers_expected
from trainer.parallel.waiting import Waiting, waiting

# Longer than rank 0 takes to write the largest checkpoint while the others wait in the next step.
TIMEOUT = timedelta(minutes=10)


class Grid(Parallel):
    """`n_latents` ranks share the latents; the others have the same latents and more tokens.

    Neighbours share latents, since that exchange is the larger one and neighbours are on one machine.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, rendezvous: Path, n_latents: int) -> None:
        # All ranks are on this machine; gloo would ask for its host name, which need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with peers_expected("the ranks could not find each other"):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                # Not as file://, in which a # or ? would cut the path short.
                store=dist.FileStore(str(rendezvous), world_size),
                rank=rank,
                world_size=world_size,
                timeout=TIMEOUT,
            )
            shape = (world_size // n_latents, n_latents)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "latents"))
        time = waiting(device)
        super().__init__(
            device,
            data=_ranks(mesh.get_group("data"), shape[0], time),
            latents=_ranks(mesh.get_group("latents"), shape[1], time),
            world=Ranks(None, time),
            waiting=time,
        )

    def close(self) -> None:
        dist.destroy_process_group()


def _ranks(group: dist.ProcessGroup, size: int, time: Waiting) -> Group:
    return Ranks(group, time) if size > 1 else Group()
