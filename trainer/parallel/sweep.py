"""Splits the SAEs in a sweep across ranks; each rank processes all tokens, so training needs no communication."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group, gather_bytes
from trainer.parallel.process_group import World
from trainer.parallel.shares import Shares

_KINDS = {str(kind): kind for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8)}
_KINDS |= {str(kind): kind for kind in (torch.int64, torch.int32, torch.bool, torch.float64)}


class Sweep(Parallel):
    """A parallel mode in which every rank reads all tokens; on each host, only the first rank reads from the disk.

    Rank 0 writes the checkpoints and metrics for all SAEs, so the other ranks send it their tensors and measurements.
    """

    def __init__(self, world: World, job: JobConfig, shares: Shares) -> None:
        super().__init__(world.device, world=world.group, waiting=world.waiting)
        self._all = world

    def neighbours_with_these_tokens(self) -> Group:
        return self._all.neighbours([range(self._all.size)])

    @property
    def learns_alone(self) -> bool:
        return True

    def all_gather(self, own: dict[str, Any]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for encoded in gather_bytes(self.world, msgspec.msgpack.encode(own), self.device):
            merged |= msgspec.msgpack.decode(encoded)
        return merged

    def collect(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        shapes = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
        encoded = msgspec.msgpack.encode(shapes)
        of_ranks = [msgspec.msgpack.decode(part) for part in gather_bytes(self.world, encoded, self.device)]
        if not self.is_main:
            for tensor in tensors.values():
                self.world.send_to_first(tensor)
            return {}
        gathered = {name: tensor.cpu() for name, tensor in tensors.items()}
        for rank, theirs in enumerate(of_ranks[1:], start=1):
            for name, (shape, kind) in theirs.items():
                empty = torch.empty(shape, dtype=_KINDS[kind], device=self.device)
                gathered[name] = self.world.receive_from(rank, empty).cpu()
        return gathered
