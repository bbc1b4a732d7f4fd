"""Progress of a run whose store is on another host: lines appended to a file that the store's owner reads.

SQLite's WAL needs memory that hosts do not share, and its locks cannot be trusted on a network file system.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from trainer.contract.paths import open_private
from trainer.contract.store.metrics_store import Heartbeat, Row
from trainer.contract.store.progress_line import ProgressLine, encode, stored_rows
from trainer.contract.store.rows import Event
from trainer.reporting.progress import Wanted


class FileRequests:
    """Requests to a run, made by files in its attempt's folder."""

    def __init__(self, stop_file: Path, finish_file: Path) -> None:
        self._stop_file, self._finish_file = stop_file, finish_file

    def wanted(self) -> Wanted:
        return Wanted(_stamp(self._stop_file), self._finish_file.exists())


def _stamp(file: Path) -> tuple[int, ...]:
    """Return what changes when a file is written again; () without a file."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns


class LineFile:
    """Appends a line for every flush; the first one carries `rewind`, where a resumed run cuts back its history."""

    def __init__(self, path: Path, rewind: Heartbeat | None = None) -> None:
        self._path, self._rewind, self._cut = path, rewind, False

    def write(self, rows: Iterable[Row], heartbeat: Heartbeat | None, events: Iterable[Event]) -> None:
        self._append(encode(ProgressLine(stored_rows(rows), heartbeat, tuple(events), self._rewind)))
        self._rewind = None

    def mend(self) -> str:
        """Return "": damage is dealt with by the reader of the file, which keeps what was in it."""
        return ""

    def give_up_corrupt(self) -> str:
        return ""

    def let_go(self) -> None:
        """Do nothing, since the file is opened for every line."""

    def close(self) -> None:
        """Write the `rewind` of a run that had nothing else to write."""
        if self._rewind:
            self.write((), None, ())

    def _append(self, line: bytes) -> None:
        """Append a line in one write; raise `OSError` if only a part of it was written.

        Such a part, which a full disk has cut, is ended by a newline before the next line.
        """
        descriptor = open_private(self._path, os.O_APPEND)
        try:
            if self._cut:
                os.write(descriptor, b"\n")
                self._cut = False
            written = os.write(descriptor, line)
            self._cut = written < len(line)
        finally:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if self._cut:
            raise OSError(f"only {written} of {len(line)} bytes were written to {self._path}")
