"""`metrics.db` over the life of a run: opened when that is possible, and made anew where it is gone or damaged."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trainer.contract.store.database import StoreCorrupt, check_whole, file_identity, set_aside
from trainer.contract.store.metrics_store import Heartbeat, Row, SeriesWriter
from trainer.contract.store.rows import Event


class SeriesFile:
    """Writes where the path leads; `mended` says what became of what was there before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: SeriesWriter | None = None
        self._identity: tuple[int, int] | None = None
        self._touched: tuple[int, int] | None = None

    def write(self, rows: Iterable[Row], heartbeat: Heartbeat | None, events: Iterable[Event]) -> None:
        """One flush, whole or not at all; raises `StoreError`."""
        if self._writer is None:
            self._writer = SeriesWriter(self.path)
            self._identity = file_identity(self.path)
        self._writer.write(rows, heartbeat, events)
        self._touched = _touched(self.path)

    def mended(self) -> str:
        """Make way for a new file where this one is lost, and says why; empty where all is well.

        SQLite itself would go on writing into a file that has no name any more, and into a damaged one for as long
        as it has all it needs of it in memory.
        """
        if self._identity is None:
            return ""
        found = file_identity(self.path)
        if found is None:
            return self._give_up("was deleted", "deleted")
        if found != self._identity:
            return self._give_up("was replaced", "replaced")
        # Nobody else writes to it.
        if self._touched is not None and _touched(self.path) != self._touched:
            try:
                check_whole(self.path, "metrics")
            except StoreCorrupt:
                return self.give_up_corrupt()
            self._touched = _touched(self.path)
        return ""

    def give_up_corrupt(self) -> str:
        """After `StoreCorrupt`: the next write makes a new file."""
        return self._give_up("was damaged", "corrupt")

    def let_go(self) -> None:
        """Close without waiting; the next write opens it again."""
        if self._writer:
            self._writer.abandon()
        self._writer = None

    def close(self) -> None:
        """Leave everything in the one file."""
        if self._writer:
            self._writer.close()
        self._writer = None

    def _give_up(self, what: str, word: str) -> str:
        # Under its old name, closing the last connection would put the log into a file that it does not belong to.
        aside = set_aside(self.path, word)
        self.let_go()
        self._identity = self._touched = None
        return f"{self.path.name} {what}" + (f" and is kept as {aside.name}" if aside else "")


def _touched(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns
