"""The SAEs of a sweep dealt out over the ranks, each with all tokens: nothing of their training crosses a wire."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.process_group import World
from trainer.parallel.shares import Shares

_KINDS = {str(kind): kind for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8)}
_KINDS |= {str(kind): kind for kind in (torch.int64, torch.int32, torch.bool, torch.float64)}


class Sweep(Parallel):
    """Every rank reads all tokens, which are in the page cache of a host from the second on.

    Rank 0 writes checkpoints and metrics of all of them, and so is told what the others have found.
    """

    def __init__(self, world: World, job: JobConfig, shares: Shares) -> None:
        super().__init__(world.device, world=world.group, waiting=world.waiting)

    @property
    def learns_alone(self) -> bool:
        return True

    def everybodys(self, found: dict[str, Any]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for part in self._told(msgspec.msgpack.encode(found)):
            merged |= msgspec.msgpack.decode(part)
        return merged

    def collected(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        shapes = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
        of_ranks = [msgspec.msgpack.decode(part) for part in self._told(msgspec.msgpack.encode(shapes))]
        if not self.is_main:
            for tensor in tensors.values():
                self.world.send_to_first(tensor)
            return {}
        found = {name: tensor.cpu() for name, tensor in tensors.items()}
        for rank, theirs in enumerate(of_ranks[1:], start=1):
            for name, (shape, kind) in theirs.items():
                empty = torch.empty(shape, dtype=_KINDS[kind], device=self.device)
                found[name] = self.world.received_from(rank, empty).cpu()
        return found

    def _told(self, own: bytes) -> list[bytes]:
        """What every rank has to say, on all of them."""
        sizes = self.world.gather(torch.tensor([len(own)], dtype=torch.int64, device=self.device)).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        found = self.world.gather(padded.to(self.device)).cpu()
        return [bytes(part[:size].tolist()) for part, size in zip(found, sizes, strict=True)]
