"""What a parallel mode answers. It has a null form, so that nothing else asks whether it runs distributed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor


class Parallel(ABC):
    """The ranks of one run, seen from one of them."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes checkpoints, metrics and the SAE."""
        return self.rank == 0

    @abstractmethod
    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replaces every tensor by its sum over ranks; raises `PeerLost` where a rank is gone."""

    @abstractmethod
    def sum_step_(self, tensors: Iterable[Tensor], wishes: tuple[bool, ...]) -> tuple[bool, ...]:
        """`sum_` at the end of a step; which wishes any rank has, on all ranks at the same step."""

    @abstractmethod
    def copy_from_main_(self, tensors: Iterable[Tensor]) -> None:
        """Replaces every tensor by rank 0's."""

    @abstractmethod
    def waited_s(self) -> float:
        """Seconds this process spent waiting for others since the last call."""

    def sum_parts(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Vectors added over ranks in a single exchange, on the CPU: here, and only here, the host waits."""
        packed = torch.cat([part.double() for part in parts.values()])
        self.sum_([packed])
        return dict(zip(parts, packed.cpu().split([len(part) for part in parts.values()]), strict=True))

    def slot(self, value: float) -> Tensor:
        """This rank's place in a vector [world_size] that becomes everybody's values when added over ranks."""
        values = torch.zeros(self.world_size, dtype=torch.float64, device=self.device)
        values[self.rank] = value
        return values

    @abstractmethod
    def close(self) -> None:
        """Leaves the group."""
