"""Recognises out-of-memory errors, which different libraries report in different ways."""

from __future__ import annotations

import gc

import torch

# Substrings of RuntimeError messages from the CPU allocator, from CUDA outside torch's allocator, and from cuBLAS.
_MESSAGES = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# The complete message from oneDNN if memory for compiled code runs out; its message for unsupported operations is
# longer.
_NO_CODE = "could not create a primitive"


def is_shortage(error: BaseException) -> bool:
    """Return whether an error means that memory ran out; numpy and C++ raise MemoryError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = str(error)
    return isinstance(error, RuntimeError) and (words == _NO_CODE or any(word in words for word in _MESSAGES))


def hand_back(device: torch.device) -> None:
    """Free unreachable objects and return unused cached GPU memory to the driver."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
