"""A number of a GPU that the host reads when it is needed for the next batch, long after the GPU had it."""

from __future__ import annotations

import torch
from torch import Tensor


class LateNumber:
    """An int64, written as a step is queued and read as the next one is.

    By then the GPU has passed the copy, or it is at most a step behind: work is queued for it, so that it never stands
    still, however long the host waits. What is read depends on nothing but the steps.
    """

    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._copy = torch.zeros((), dtype=torch.int64, pin_memory=is_gpu)
        self._copied = torch.cuda.Event() if is_gpu else None

    def write(self, number: Tensor) -> None:
        """Have the host's copy of a 0-dim tensor made; the one before must have been read."""
        self._copy.copy_(number, non_blocking=True)
        if self._copied:
            self._copied.record()

    def read(self) -> int:
        if self._copied:
            self._copied.synchronize()
        return int(self._copy)
