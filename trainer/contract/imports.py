"""Imports large modules, such as torch, without collecting garbage meanwhile."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection during imports, which create almost no garbage.

    Otherwise, Python would collect garbage about a hundred times during `import torch` and once more at the exit. Both
    take a quarter of the 1.7 s of CPU time for a process that imports torch.
    """
    gc.disable()
    try:
        yield
    finally:
        # Exclude these objects from later collections too.
        gc.freeze()
        gc.enable()
