"""Progress of a run whose store is on another host: lines appended to a file that the store's owner reads.

SQLite's WAL needs memory that hosts do not share, and its locks are not to be trusted on a network file system.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import msgspec

from trainer.contract.control import Event
from trainer.contract.progress_line import ProgressLine, encode, stored_rows
from trainer.contract.series import Heartbeat, Row
from trainer.progress import StoredProgress


class FileRequests:
    """What is asked of a run by files in its attempt's folder."""

    def __init__(self, stop_file: Path) -> None:
        self._stop_file = stop_file

    def stop_wanted(self) -> bool:
        return self._stop_file.exists()


class FileProgress(StoredProgress):
    """Appends a line every half second; `rewind` comes first where a resumed run takes its history back."""

    def __init__(
        self,
        file: Path,
        total_steps: int,
        stop: threading.Event,
        requests: FileRequests,
        rewind: Heartbeat | None = None,
    ) -> None:
        self._rewind, self._cut = rewind, False
        super().__init__(file, total_steps, stop, requests)

    def _write(self, handed_over: list[Row | Event]) -> None:
        heartbeat = self._heartbeat
        if not handed_over and not self._rewind and heartbeat is self._written:
            return
        line = ProgressLine(
            rows=stored_rows(item for item in handed_over if isinstance(item, Row)),
            heartbeat=msgspec.structs.replace(heartbeat, dropped=self._dropped) if heartbeat else None,
            events=tuple(item for item in handed_over if isinstance(item, Event)),
            rewind=self._rewind,
        )
        self._append(encode(line))
        self._written, self._rewind = heartbeat, None

    def _append(self, line: bytes) -> None:
        """In one write; the rest of a line that a full disk has cut is given up, and ended before the next one."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
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
