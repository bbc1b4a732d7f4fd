"""Keeps `gpu.db` within its retention and its size, a piece at a time."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sae_tui.gpu.stored import MINUTE_S, indices
from trainer.contract.store.database import transaction

# A piece takes some 20 ms, and adds about 2 MB to the write-ahead log, which is emptied as it goes.
BATCH_ROWS = 20_000
BATCH_PAGES = 256
TURN_S = 0.2
# What is deleted each minute is filled again by the next one: only more than that is given back to the disk.
SLACK, SLACK_PAGES = 0.1, 1000
# Making a file anew takes a second for so many bytes, and as much again of the disk, twice.
SMALL_BYTES = 128 << 20
SPARE_BYTES = 64 << 20
NO_AUTO_VACUUM = 0


@dataclass(frozen=True, slots=True)
class Retention:
    """How long samples, and the means of minutes, are kept."""

    raw_hours: float = 24
    minutes_days: float = 30


class Upkeep:
    """Deletes what is too old once a minute, and gives the room back; for the one process that writes the file."""

    def __init__(self, path: Path, host: str, retention: Retention) -> None:
        self._path = path
        self._host = host
        self._retention = retention
        self._begun = 0.0
        self._first = True
        self._made_anew = False
        self._work: tuple[sqlite3.Connection, Iterator[None]] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is more to be done in the next turns."""
        return self._work is not None

    def turn(self, db: sqlite3.Connection, now: float) -> None:
        """Do a fifth of a second of what is to be done, and the rest in the next turns."""
        if self._work is None or self._work[0] is not db:
            if abs(now - self._begun) < MINUTE_S:
                return
            self._work = (db, self._pieces(db, now))
            self._begun = now
        until = time.monotonic() + TURN_S
        for _ in self._work[1]:
            if time.monotonic() >= until:
                return
        self._work = None

    def _pieces(self, db: sqlite3.Connection, now: float) -> Iterator[None]:
        first, self._first = self._first, False
        yield from self._delete(db, now)
        if not first:  # the first minute of an app has better things to do
            yield from self._shrink(db)

    def _delete(self, db: sqlite3.Connection, now: float) -> Iterator[None]:
        """Delete by range of the primary key, index by index: else each pass would read the whole table.

        Whole minutes only, so that the means of minutes go on exactly where the samples end.
        """
        raw = (now - self._retention.raw_hours * 3600) // MINUTE_S * MINUTE_S
        minutes = (now - self._retention.minutes_days * 86400) // MINUTE_S
        for index in indices(db, self._host):
            yield from self._delete_range(db, "gpu_metrics", "timestamp", index, raw, MINUTE_S)
            yield from self._delete_range(db, "gpu_minutes", "minute", index, minutes, 1)

    def _delete_range(
        self, db: sqlite3.Connection, table: str, key: str, index: int, before: float, unit: int
    ) -> Iterator[None]:
        """A transaction for every batch: of one for all the write-ahead log would be as large as what is deleted."""
        rows = f"FROM {table} WHERE host = ? AND gpu_index = ? AND {key} < ?"
        far = f"SELECT {key} {rows} ORDER BY {key} LIMIT 1 OFFSET {BATCH_ROWS}"
        more = True
        while more:
            found = db.execute(far, (self._host, index, before)).fetchone()
            more = found is not None
            bound = min(before, (found[0] // unit + 1) * unit) if found is not None else before
            with transaction(db):
                db.execute(f"DELETE {rows}", (self._host, index, bound))
            yield

    def _shrink(self, db: sqlite3.Connection) -> Iterator[None]:
        """Give free pages back to the disk, where they are more than what the next hours will fill."""
        pages, free = _pragma(db, "page_count"), _pragma(db, "freelist_count")
        if _pragma(db, "auto_vacuum") == NO_AUTO_VACUUM:
            self._make_anew(db, pages, free)
            return
        if free <= max(SLACK * pages, SLACK_PAGES):
            return
        while free:
            db.execute(f"PRAGMA incremental_vacuum({BATCH_PAGES})").fetchall()
            yield
            left = _pragma(db, "freelist_count")
            if left >= free:
                break
            free = left
        _empty_log(db)

    def _make_anew(self, db: sqlite3.Connection, pages: int, free: int) -> None:
        """Turn a file of an earlier version, once, into one that can give pages back; as it is where that fails."""
        n_bytes = (pages - free) * _pragma(db, "page_size")
        worth = n_bytes <= SMALL_BYTES or free >= pages / 2
        if self._made_anew or not worth or not _has_room(self._path.parent, n_bytes):
            return
        self._made_anew = True
        with suppress(sqlite3.Error):
            db.execute("PRAGMA auto_vacuum=INCREMENTAL")
            db.execute("VACUUM")
            _empty_log(db)


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


def _empty_log(db: sqlite3.Connection) -> None:
    """Cut the write-ahead log to nothing; as far as it goes where somebody reads just now."""
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _has_room(folder: Path, n_bytes: int) -> bool:
    """Whether the disk holds a copy in the log, and the one for temporary files another."""
    places = [os.environ.get("SQLITE_TMPDIR"), os.environ.get("TMPDIR"), "/var/tmp", "/usr/tmp", "/tmp", "."]
    temporary = next(place for place in places if place and os.access(place, os.W_OK | os.X_OK))
    room = min(shutil.disk_usage(folder).free, shutil.disk_usage(temporary).free)
    return room >= 2 * n_bytes + SPARE_BYTES
