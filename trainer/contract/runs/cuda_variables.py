"""Variables that PyTorch reads once, at the first use of a GPU; what the user sets takes precedence."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Products that give the same result every time need it. PyTorch before 2.10 notes at the first product whether it is
# set, and then refuses every product of a deterministic run; what a rank measures before it trains are products too.
_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

# Tensors of many sizes come and go in a step. With segments that grow, PyTorch takes hardly more memory than they need;
# with segments of fixed sizes up to 40 % more. PyTorch before 2.10 reads the first name and newer ones the second, and
# warn of the first where the second is missing.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_GROWING = "expandable_segments:True"


def presets(base: Mapping[str, str]) -> dict[str, str]:
    """Return variables and values for ranks on GPUs that would else have the environment `base`."""
    # Either name may take precedence, so a user's value under one must not meet ours under the other.
    is_free = not any(name in base for name in (*_ALLOCATOR, "PYTORCH_HIP_ALLOC_CONF"))
    return _WORKSPACE | (dict.fromkeys(_ALLOCATOR, _GROWING) if is_free else {})


def set_here() -> None:
    """Set in this process, before it loads PyTorch, what its environment leaves open."""
    os.environ.update(presets(os.environ) | dict(os.environ))
