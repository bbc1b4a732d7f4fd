"""Reports a run's progress to a store on another host by appending lines to a file that the other host reads.

SQLite cannot be used, because its WAL needs shared memory and its locks are unreliable on network file systems.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from trainer.contract.paths import open_private
from trainer.contract.store.metrics_store import Heartbeat, MetricRow
from trainer.contract.store.progress_line import ProgressLine, encode, stored_rows
from trainer.contract.store.rows import Event
from trainer.reporting.progress import Wanted


class FileRequests:
    """Reads requests for a run from files in the attempt folder."""

    def __init__(self, stop_file: Path, finish_file: Path) -> None:
        self._stop_file, self._finish_file = stop_file, finish_file

    def wanted(self) -> Wanted:
        return Wanted(_stamp(self._stop_file), self._finish_file.exists())


def _stamp(file: Path) -> tuple[int, ...]:
    """Return a value that changes whenever the file is written; () if there is no file."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns


class LineFile:
    """Appends a line to a file at every write.

    In a resumed run, the first line contains `rewind` with the checkpoint's step. The file's reader deletes the history
    after this step.
    """

    def __init__(self, path: Path, rewind: Heartbeat | None = None) -> None:
        self._path, self._rewind, self._cut = path, rewind, False

    def write(self, rows: Iterable[MetricRow], heartbeat: Heartbeat | None, events: Iterable[Event]) -> None:
        self._append(encode(ProgressLine(stored_rows(rows), heartbeat, tuple(events), self._rewind)))
        self._rewind = None

    def mend(self) -> str:
        """Return "": the file's reader handles damage and keeps the lines it has already read."""
        return ""

    def give_up_corrupt(self) -> str:
        return ""

    def let_go(self) -> None:
        """Do nothing, because every write opens and closes the file."""

    def close(self) -> None:
        """If the run has not written any line yet, write one with `rewind`."""
        if self._rewind:
            self.write((), None, ())

    def _append(self, line: bytes) -> None:
        """Append a line in one write; raise `OSError` if the line is incomplete, for example because the disk is full.

        After an incomplete line, the next call starts with a newline.
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
