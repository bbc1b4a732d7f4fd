"""Environment variables that PyTorch reads once, when a GPU is first used; the user's own values take precedence."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

# Deterministic matmuls need this variable. PyTorch before 2.10 reads it at the first matmul, which happens while a rank
# measures speeds before training. If the variable is not set by then, all matmuls in a deterministic run fail.
_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

# Each step allocates and frees tensors of many sizes. With expandable segments, PyTorch reserves little more memory
# than the tensors need; with fixed-size segments, it reserves up to 40 % more. PyTorch before 2.10 reads the first
# variable. Newer versions read the second variable, and warn if only the first is set.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_GROWING = "expandable_segments:True"

# Caches of compiled kernels. By default, the caches are in the home folder, which is often on a network file system.
# If several ranks compile there at the same time, they delete each other's files. A rank whose files have been deleted
# trains without these kernels and is several times slower.
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
_LOCAL = Path("/var/tmp")


def presets(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment `base` of ranks on GPUs."""
    # Either name may take precedence, so set neither if the user has set one of them.
    is_free = not any(name in base for name in (*_ALLOCATOR, "PYTORCH_HIP_ALLOC_CONF"))
    return _WORKSPACE | (dict.fromkeys(_ALLOCATOR, _GROWING) if is_free else {}) | _caches()


def _caches() -> dict[str, str]:
    """Return local folders for compiled kernels, writable only by this user, or {} if there are none.

    Ranks execute the compiled kernels, so a folder created by another user is not used.
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
    """Set the variables missing from this process's environment; call this before PyTorch is loaded."""
    os.environ.update(presets(os.environ) | dict(os.environ))
