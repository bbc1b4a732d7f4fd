"""Chooses the inspector for shards in formats that need torch or pyarrow.

This module imports neither of them, because every program loads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Returns the `ShardSet` at a path, given its files and the setting to mention in a `JobFileError`.
Inspector = Callable[[Path, Sequence[Path], str], Any]
_INSPECTORS: list[Inspector] = []


@contextlib.contextmanager
def inspecting_by(inspector: Inspector) -> Iterator[None]:
    """Use `inspector` for the formats that need torch or pyarrow, in all threads of this process."""
    _INSPECTORS.append(inspector)
    try:
        yield
    finally:
        _INSPECTORS.remove(inspector)


def inspector() -> Inspector | None:
    """Return the inspector in use, or None if only the trainer can read formats that need torch or pyarrow."""
    return _INSPECTORS[-1] if _INSPECTORS else None
