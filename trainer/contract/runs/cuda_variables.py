"""Variables that PyTorch reads once, at the first use of a GPU; what the user sets takes precedence."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

# Products that give the same result every time need it. PyTorch before 2.10 notes at the first product whether it is
# set, and then refuses every product of a deterministic run; what a rank measures before it trains are products too.
_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

# Tensors of many sizes come and go in a step. With segments that grow, PyTorch takes hardly more memory than they need;
# with segments of fixed sizes up to 40 % more. PyTorch before 2.10 reads the first name and newer ones the second, and
# warn of the first where the second is missing.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_GROWING = "expandable_segments:True"

# Compiled kernels. By default they are in the home folder, often on a network file system. Ranks that compile there at
# the same time remove each other's files; such a rank then trains without kernels, several times slower.
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
_LOCAL = Path("/var/tmp")


def presets(base: Mapping[str, str]) -> dict[str, str]:
    """Return variables and values for ranks on GPUs that would else have the environment `base`."""
    # Either name may take precedence, so a user's value under one must not meet ours under the other.
    is_free = not any(name in base for name in (*_ALLOCATOR, "PYTORCH_HIP_ALLOC_CONF"))
    return _WORKSPACE | (dict.fromkeys(_ALLOCATOR, _GROWING) if is_free else {}) | _caches()


def _caches() -> dict[str, str]:
    """Return folders on a local disk for compiled kernels, which only this user may write; {} where there are none.

    Kernels are code that ranks run, so a folder that another user has made is not used.
    """
    folder = _LOCAL / f"sae-tui-{os.getuid()}"
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        # Triton loads libraries from there, which some machines forbid.
        if is_private and not os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return {name: str(folder / subject) for name, subject in _CACHES.items()}
    return {}


def set_here() -> None:
    """Set in this process, before it loads PyTorch, what its environment leaves open."""
    os.environ.update(presets(os.environ) | dict(os.environ))
