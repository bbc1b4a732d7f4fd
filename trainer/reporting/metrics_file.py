"""Writes `metrics.db` during a run, and creates a new file if the current one is deleted, replaced or corrupted."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trainer.contract.store.database import StoreCorrupt, check_whole, file_identity, set_aside
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.rows import Event


class SeriesFile:
    """A metrics store at `path`, opened at the first write and replaced if it is lost."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: SeriesWriter | None = None
        self._identity: tuple[int, int] | None = None
        self._touched: tuple[int, int] | None = None

    def write(self, rows: Iterable[MetricRow], heartbeat: Heartbeat | None, events: Iterable[Event]) -> None:
        """Write the rows, the heartbeat and the events in a single transaction; raise `StoreError` if this fails."""
        if self._writer is None:
            self._writer = SeriesWriter(self.path)
            self._identity = file_identity(self.path)
        self._writer.write(rows, heartbeat, events)
        self._touched = _stamp(self.path)

    def mend(self) -> str:
        """Set a lost or corrupt file aside, so that the next write creates a new file; return the reason, or "".

        SQLite itself would continue to write to a deleted file, and to a corrupt file as long as the required pages are
        in memory.
        """
        if self._identity is None:
            return ""
        identity = file_identity(self.path)
        if identity is None:
            return self._give_up("was deleted", "deleted")
        if identity != self._identity:
            return self._give_up("was replaced", "replaced")
        # No other process should be writing to the file, so validate it if it has changed.
        if self._touched is not None and _stamp(self.path) != self._touched:
            try:
                check_whole(self.path, "metrics")
            except StoreCorrupt:
                return self.give_up_corrupt()
            self._touched = _stamp(self.path)
        return ""

    def give_up_corrupt(self) -> str:
        """Set the file aside after `StoreCorrupt` and return the reason; the next write creates a new file."""
        return self._give_up("was damaged", "corrupt")

    def let_go(self) -> None:
        """Close without waiting for locks; the next write reopens the file."""
        if self._writer:
            self._writer.abandon()
        self._writer = None

    def close(self) -> None:
        """Close after moving the write-ahead log into the file."""
        if self._writer:
            self._writer.close()
        self._writer = None

    def _give_up(self, what: str, word: str) -> str:
        # Rename before closing: when the last connection is closed, SQLite writes the log into the file with the
        # original name, which may be a different file by now.
        aside = set_aside(self.path, word)
        self.let_go()
        self._identity = self._touched = None
        return f"{self.path.name} {what}" + (f" and is kept as {aside.name}" if aside else "")


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a file's size and modification time (ns), which reveal writes to it, or None if there is no file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns
