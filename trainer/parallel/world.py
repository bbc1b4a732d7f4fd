"""All ranks of a run, before it is known how they share the work."""

from __future__ import annotations

import fcntl
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.contract.problems import UserError
from trainer.parallel.group import Group, Ranks, peers_expected
from trainer.parallel.shared import among_neighbours
from trainer.parallel.waiting import Waiting, waiting

# Longer than rank 0 takes to write the largest checkpoint while the others wait in the next step.
TIMEOUT = timedelta(minutes=10)


class World:
    """One process alone: the null form."""

    def __init__(self, device: torch.device, group: Group | None = None, time: Waiting | None = None) -> None:
        self.device, self.group, self.waiting = device, group or Group(), time

    @property
    def size(self) -> int:
        return self.group.size

    def close(self) -> None:
        """Leaves the others."""


class Joined(World):
    """Processes that found each other."""

    def __init__(self, device: torch.device) -> None:
        time = waiting(device)
        super().__init__(device, ranks_of(None, device, time), time)

    def close(self) -> None:
        dist.destroy_process_group()


def ranks_of(group: dist.ProcessGroup | None, device: torch.device, time: Waiting) -> Ranks:
    """The ranks of a process group by the fastest way between them; all of them have to ask."""
    return Ranks(group, time) if device.type == "cuda" else among_neighbours(group, time, TIMEOUT.total_seconds())


def join(
    device: torch.device, rank: int, world_size: int, rendezvous: Path | None, *, on_one_host: bool = True
) -> World:
    """Meets the other ranks by a file that all of them see; without one by torchrun's environment, on any host."""
    if world_size == 1:
        return World(device)
    if rendezvous:
        _need_locks(rendezvous)
        if on_one_host:
            # Others have no business there; and gloo would ask for the host's name, which need not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with peers_expected("the ranks could not find each other"):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            # Not as file://, in which a # or ? would cut the path short.
            store=dist.FileStore(str(rendezvous), world_size) if rendezvous else None,
            rank=rank if rendezvous else -1,
            world_size=world_size if rendezvous else -1,
            timeout=TIMEOUT,
        )
    return Joined(device)


def _need_locks(rendezvous: Path) -> None:
    """Raises `UserError` where processes cannot write to one file in turn."""
    descriptor = os.open(rendezvous, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        reason = f"the ranks cannot meet in {rendezvous.parent}, whose file system has no locks ({error.strerror})"
        raise UserError(f"{reason}; mount it with them, or put the data folder on another (--data-dir)") from None
    finally:
        os.close(descriptor)
