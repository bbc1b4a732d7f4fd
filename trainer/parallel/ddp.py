"""A full replica on every rank; gradients are summed over ranks once per step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.problems import UserError
from trainer.parallel.base import Parallel
from trainer.parallel.waiting import waiting
from trainer.parallel.wishes import wishes_reader

# Longer than rank 0 takes to write the largest checkpoint while the others wait in the next step.
TIMEOUT = timedelta(minutes=10)


class PeerLost(UserError):
    """Another rank has ended, so this one cannot go on."""


class Ddp(Parallel):
    """Explicit sums rather than DistributedDataParallel: a sparse backward pass is too short to hide transfers in."""

    def __init__(self, rank: int, world_size: int, device: torch.device, rendezvous: Path) -> None:
        super().__init__(rank, world_size, device)
        self._waiting = waiting(device)
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
        self._wishes = wishes_reader(device)

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        self._together(dist.all_reduce(tensor, async_op=True) for tensor in tensors)

    def sum_step_(self, tensors: Iterable[Tensor], wishes: tuple[bool, ...]) -> tuple[bool, ...]:
        # Filled on the device, where a copy from the host would wait.
        wanted = torch.stack([torch.full((), float(wish), device=self.device) for wish in wishes])
        self.sum_([*tensors, wanted])
        return self._wishes.read(wanted)

    def copy_from_main_(self, tensors: Iterable[Tensor]) -> None:
        self._together(dist.broadcast(tensor, src=0, async_op=True) for tensor in tensors)

    def waited_s(self) -> float:
        return self._waiting.take_s()

    def close(self) -> None:
        dist.destroy_process_group()

    def _together(self, transfers: Iterable[Any]) -> None:
        """Starts all transfers, then waits for them."""
        with peers_expected("the connection to another rank was lost"), self._waiting.measured():
            for transfer in list(transfers):
                transfer.wait()


@contextlib.contextmanager
def peers_expected(otherwise: str) -> Iterator[None]:
    """Tells a failed exchange as `otherwise` with PyTorch's reason; memory that runs out is our own."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # dist.DistError among them
        reason = str(error).strip().splitlines()[0]
        raise PeerLost(f"{otherwise} ({reason})") from error
