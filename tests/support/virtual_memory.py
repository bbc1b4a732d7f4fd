"""Matrices larger than physical memory, for tests that read and write only small parts of each matrix."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# The minimum number of elements of a large tensor.
_LARGE = 2**20
# With this flag, Linux allows a mapping larger than physical memory. Python 3.11 has no name for the flag.
_MAP_NORESERVE = 0x4000


class VirtualMemory(TorchDispatchMode):
    """Fills empty tensors with 0. Large tensors use memory only for written pages.

    Each tensor is preceded by unused memory of the same size, so that an index made negative by an overflow does not
    crash the process.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if "empty" not in func.__name__:
            return func(*args, **named)
        like = func(*args, **named | {"device": "meta"})
        if like.numel() < _LARGE:
            return func(*args, **named).zero_()
        memory = mmap.mmap(-1, 2 * like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=like.nbytes).view(like.shape)
