"""Environment variables that PyTorch reads once, at the first use of a GPU; the user's own values take precedence."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

# Deterministic matmuls need this variable. PyTorch before 2.10 reads it at the first matmul, and without it refuses all
# matmuls of a deterministic run. The measurements of a rank before training already run matmuls.
_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

# Each step allocates and frees tensors of many sizes. With expandable segments PyTorch reserves little more memory than
# they need; with segments of fixed sizes, up to 40 % more. PyTorch before 2.10 reads the first name. Newer versions
# read the second one, and warn if only the first is set.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_GROWING = "expandable_segments:True"

# Caches of compiled kernels. By default they are in the home folder, often on a network file system. Ranks that compile
# there at the same time remove each other's files; a rank that loses its files trains without kernels, several times
# slower.
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
_LOCAL = Path("/var/tmp")


def presets(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment `base` of ranks on GPUs."""
    # Either name may take precedence, so if the user has set one of them, set neither.
    is_free = not any(name in base for name in (*_ALLOCATOR, "PYTORCH_HIP_ALLOC_CONF"))
    return _WORKSPACE | (dict.fromkeys(_ALLOCATOR, _GROWING) if is_free else {}) | _caches()


def _caches() -> dict[str, str]:
    """Return folders on a local disk for compiled kernels that only this user may write, or {} if there are none.

    Ranks execute compiled kernels, so a folder that another user has created is not used.
    """
    folder = _LOCAL / f"sae-tui-{os.getuid()}"
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        # Triton loads shared libraries from the folder, which fails on a file system mounted noexec.
        if is_private and not os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return {name: str(folder / subject) for name, subject in _CACHES.items()}
    return {}


def set_here() -> None:
    """Set the variables that this process's environment lacks; call this before PyTorch is loaded."""
    os.environ.update(presets(os.environ) | dict(os.environ))
