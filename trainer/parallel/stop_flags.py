"""Decides from all-reduced flags whether any rank asked to stop or to save."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Requests(Protocol):
    """Reads summed flags; the result is the same on all ranks, since it depends only on the sums."""

    def read(self, total: Tensor) -> tuple[bool, ...]:
        """Return for each of the n requests whether any rank has made it; `total` [n] has the sums of this step."""


class HostRequests:
    """Reads sums in host memory, which are available as soon as the exchange is done."""

    def read(self, total: Tensor) -> tuple[bool, ...]:
        return tuple(total.bool().tolist())


class CudaRequests:
    """Reads the sums one step late: the previous copy ends while this step is queued, so no step waits for it."""

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
        # In the first step, `before` was never recorded: its event counts as complete, and its copy is 0.
        self._copied[before].synchronize()
        return tuple(self._copies[before].bool().tolist())


def requests_reader(device: torch.device) -> Requests:
    """Return the reader for this device."""
    return CudaRequests() if device.type == "cuda" else HostRequests()
