"""Matrices larger than memory; a test reads and writes only a small part of them."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# A tensor with at least this many elements is large.
_LARGE = 2**20
# With this flag Linux does not reject a mapping that is larger than memory; Python 3.11 has no name for it.
_MAP_NORESERVE = 0x4000


class VirtualMemory(TorchDispatchMode):
    """Fills empty tensors with 0; large ones use memory only for the pages that are written.

    Each tensor is preceded by unused memory of the same size, so that a negative index caused by an overflow can be
    read.
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
