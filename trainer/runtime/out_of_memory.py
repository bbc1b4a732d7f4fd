"""Recognises that memory has run out, which every library reports in its own words."""

from __future__ import annotations

import gc

import torch

# Of errors without a type of their own: the CPU's allocator, CUDA outside of torch's, the workspace of its products.
_MESSAGES = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# All that oneDNN says where there is no memory for the code that it compiles; of what it cannot do it says more.
_NO_CODE = "could not create a primitive"


def is_shortage(error: BaseException) -> bool:
    """Tell whether an error means that memory was missing; MemoryError is numpy's and that of C++."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = str(error)
    return isinstance(error, RuntimeError) and (words == _NO_CODE or any(word in words for word in _MESSAGES))


def hand_back(device: torch.device) -> None:
    """Give memory that nothing refers to any more back to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
