"""Reads what any rank wishes, to stop or to save, from flags that were summed over ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Wishes(Protocol):
    """Answers the same on all ranks, for it looks at nothing but the sums."""

    def read(self, total: Tensor) -> tuple[bool, ...]:
        """Which wishes are to be granted, from this step's sums [n]."""


class HostWishes:
    """Sums on the host are there as soon as the exchange is."""

    def read(self, total: Tensor) -> tuple[bool, ...]:
        return tuple(total.bool().tolist())


class CudaWishes:
    """Reads one step late: the copy of the step before has passed while this one was queued, so no step waits."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._step = 0

    def read(self, total: Tensor) -> tuple[bool, ...]:
        if not self._copies:
            self._copies = [torch.zeros(len(total), pin_memory=True) for _ in range(2)]
        now, before = self._step % 2, (self._step + 1) % 2
        self._copies[now].copy_(total, non_blocking=True)
        self._copied[now].record()
        self._step += 1
        # An event that was never recorded has passed, and its copy is 0.
        self._copied[before].synchronize()
        return tuple(self._copies[before].bool().tolist())


def wishes_reader(device: torch.device) -> Wishes:
    """The way to read them on this device."""
    return CudaWishes() if device.type == "cuda" else HostWishes()
