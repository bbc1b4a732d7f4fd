"""One process, one device: nothing crosses a wire."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from trainer.parallel.base import Parallel


class Single(Parallel):
    """The null form."""

    def __init__(self, rank: int, world_size: int, device: torch.device, rendezvous: Path) -> None:
        super().__init__(rank, world_size, device)

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        pass

    def sum_step_(self, tensors: Iterable[Tensor], wishes: tuple[bool, ...]) -> tuple[bool, ...]:
        return wishes

    def copy_from_main_(self, tensors: Iterable[Tensor]) -> None:
        pass

    def waited_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass
