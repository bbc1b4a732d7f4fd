"""The interface for readers of files in which programs store metrics, and code that the readers share."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from trainer.contract.store.rows import Count

# At most this many bytes of a file are read per turn.
MOST_BYTES = 2 * 2**20
# Larger records are skipped; they contain images or histograms.
LARGEST_RECORD = 2**20


class FilePosition(msgspec.Struct):
    """How far a file has been read; `place` is an offset or, in a database, a row. If `is_damaged`, no more is read.

    Database rows older than `since` are from another program.
    """

    since: float = 0.0
    place: Count = 0
    is_damaged: bool = False
    # The file's size and modification time when it was last read, and whether that read found nothing new.
    size: int = 0
    mtime_ns: int = 0
    is_read: bool = False


class FileValues(NamedTuple):
    """The values at one step; `group` identifies the run in a file that contains several."""

    step: int
    values: Mapping[str, float]
    group: str = ""


class MetricsFile(Protocol):
    """Reads new values from a file; a reader advances the position only past complete records."""

    def __call__(self, path: Path, position: FilePosition) -> Iterator[FileValues]: ...


class FileWindow:
    """A file's next bytes, at most `MOST_BYTES` of them, accessed by their offset in the file."""

    def __init__(self, stream: io.BufferedReader, offset: int) -> None:
        self._stream, self._begin = stream, offset
        self.size = os.fstat(stream.fileno()).st_size
        stream.seek(offset)
        self._bytes = stream.read(MOST_BYTES)

    def get(self, offset: int, n: int) -> bytes | None:
        """Return `n` bytes, or None if they are not in the window."""
        at = offset - self._begin
        content = self._bytes[at : at + n]
        return content if len(content) == n else None
