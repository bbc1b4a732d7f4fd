"""Memory that runs out, of which every library has its own word."""

from __future__ import annotations

import gc

import torch

# What has no type of its own: the CPU's allocator, CUDA outside of torch's, and the workspace of its products.
_SAID = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_shortage(error: BaseException) -> bool:
    """Whether what was raised means that memory was missing; MemoryError is numpy's and that of C++."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _SAID)


def hand_back(device: torch.device) -> None:
    """Give back to the system what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
