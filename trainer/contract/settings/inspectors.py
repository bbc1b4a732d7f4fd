"""Chooses what reads the shards in formats that need torch or pyarrow. Every program loads this module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.contract.settings.shards import ShardSet

# Returns the shards at a path, given their files and the setting to mention in a `JobFileError`.
Inspector = Callable[[Path, Sequence[Path], str], "ShardSet"]
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
    """Return what reads these formats, or None if only the trainer can read them."""
    return _INSPECTORS[-1] if _INSPECTORS else None
