"""Writes `metrics.db` during a run: opens it when possible, and makes a new file if it is gone or damaged."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trainer.contract.store.database import StoreCorrupt, check_whole, file_identity, set_aside
from trainer.contract.store.metrics_store import Heartbeat, Row, SeriesWriter
from trainer.contract.store.rows import Event


class SeriesFile:
    """A store at `path`; `mended` says what happened to the file that was there before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: SeriesWriter | None = None
        self._identity: tuple[int, int] | None = None
        self._touched: tuple[int, int] | None = None

    def write(self, rows: Iterable[Row], heartbeat: Heartbeat | None, events: Iterable[Event]) -> None:
        """Write one flush, whole or not at all; raise `StoreError`."""
        if self._writer is None:
            self._writer = SeriesWriter(self.path)
            self._identity = file_identity(self.path)
        self._writer.write(rows, heartbeat, events)
        self._touched = _stamp(self.path)

    def mend(self) -> str:
        """Set a lost or damaged file aside, so that the next write makes a new one, and return why; "" if all is well.

        SQLite itself would go on writing into a file that was deleted, and into a damaged one as long as it has all the
        pages that it needs in memory.
        """
        if self._identity is None:
            return ""
        identity = file_identity(self.path)
        if identity is None:
            return self._give_up("was deleted", "deleted")
        if identity != self._identity:
            return self._give_up("was replaced", "replaced")
        # Nobody else writes to it.
        if self._touched is not None and _stamp(self.path) != self._touched:
            try:
                check_whole(self.path, "metrics")
            except StoreCorrupt:
                return self.give_up_corrupt()
            self._touched = _stamp(self.path)
        return ""

    def give_up_corrupt(self) -> str:
        """Set the file aside after `StoreCorrupt`, and return why; the next write makes a new one."""
        return self._give_up("was damaged", "corrupt")

    def let_go(self) -> None:
        """Close without waiting; the next write opens the file again."""
        if self._writer:
            self._writer.abandon()
        self._writer = None

    def close(self) -> None:
        """Close, with everything in the one file and no write-ahead log."""
        if self._writer:
            self._writer.close()
        self._writer = None

    def _give_up(self, what: str, word: str) -> str:
        # Set aside before it is closed: under the old name, closing the last connection would put the log into a file
        # that it does not belong to.
        aside = set_aside(self.path, word)
        self.let_go()
        self._identity = self._touched = None
        return f"{self.path.name} {what}" + (f" and is kept as {aside.name}" if aside else "")


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return size and modification time (ns) of a file, which change when somebody writes to it; None without one."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns
