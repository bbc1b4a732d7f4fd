"""Reads whether any rank wants to stop from a flag that was summed over ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class StopFlag(Protocol):
    """Answers the same on all ranks, for it looks at nothing but the sum."""

    def read(self, total: Tensor) -> bool:
        """Whether it is time to stop, from this step's sum [1]."""


class HostStopFlag:
    """A sum on the host is there as soon as the exchange is."""

    def read(self, total: Tensor) -> bool:
        return bool(total.item())


class CudaStopFlag:
    """Reads one step late: the copy of the step before has passed while this one was queued, so no step waits."""

    def __init__(self) -> None:
        self._copies = [torch.zeros(1, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._step = 0

    def read(self, total: Tensor) -> bool:
        now, before = self._step % 2, (self._step + 1) % 2
        self._copies[now].copy_(total, non_blocking=True)
        self._copied[now].record()
        self._step += 1
        # An event that was never recorded has passed, and its copy is 0.
        self._copied[before].synchronize()
        return bool(self._copies[before].item())


def stop_flag(device: torch.device) -> StopFlag:
    """The way to read it on this device."""
    return CudaStopFlag() if device.type == "cuda" else HostStopFlag()
