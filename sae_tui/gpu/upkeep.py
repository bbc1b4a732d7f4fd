"""Deletes old rows from `gpu.db` and shrinks the file, in small batches."""

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

# A batch takes about 20 ms and adds about 2 MB to the write-ahead log, which can be checkpointed between batches.
BATCH_ROWS = 20_000
BATCH_PAGES = 256
TURN_S = 0.2
# Below these limits, free pages are kept for future rows instead of being returned to the file system.
SLACK, SLACK_PAGES = 0.1, 1000
# Rewriting a file of this size takes a second and temporarily requires twice the file's size on disk.
SMALL_BYTES = 128 << 20
SPARE_BYTES = 64 << 20
NO_AUTO_VACUUM = 0
# The smallest change that counts as a clock jump, and how long the clock is distrusted after a jump.
JUMP_S, DOUBTED_S = 120.0, 86_400.0
# The smallest gap in the stored rows that counts as a clock jump, and how long rows must follow the gap before the new
# time is accepted.
UNRECORDED_S, STORED_S = 7200.0, 1800.0


@dataclass(frozen=True, slots=True)
class Retention:
    """How long samples and minute means are kept."""

    raw_hours: float = 24
    minutes_days: float = 30


class Upkeep:
    """Deletes old rows once per minute and frees their disk space; used only by the process writing the file."""

    def __init__(self, path: Path, host: str, retention: Retention) -> None:
        self._path = path
        self._host = host
        self.retention = retention
        self._begun = 0.0
        self._first = True
        self._is_rebuilt = False
        # The wall-clock time and the time since boot at which the wall clock was last trusted.
        self._clocks: tuple[float, float] | None = None
        self._work: tuple[sqlite3.Connection, Iterator[None]] | None = None

    @property
    def busy(self) -> bool:
        """True while a pass over the file is incomplete."""
        return self._work is not None

    def turn(self, db: sqlite3.Connection, now: float) -> None:
        """Delete rows and shrink the file for up to `TURN_S` (0.2 s); the next turn picks up from there."""
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
        if not first:  # Do not slow down the app in its first minute.
            yield from self._shrink(db)

    def _delete(self, db: sqlite3.Connection, now: float) -> Iterator[None]:
        """Delete old rows.

        Delete rows separately for each GPU index, as a primary key range, to avoid reading entire tables.
        Delete only whole minutes so that there is no gap or overlap between minute means and samples.
        """
        now = self._believable(db, now)
        raw = (now - self.retention.raw_hours * 3600) // MINUTE_S * MINUTE_S
        minutes = (now - self.retention.minutes_days * 86400) // MINUTE_S
        for index in indices(db, self._host):
            yield from self._delete_range(db, "gpu_metrics", "timestamp", index, raw, MINUTE_S)
            yield from self._delete_range(db, "gpu_minutes", "minute", index, minutes, 1)

    def _believable(self, db: sqlite3.Connection, now: float) -> float:
        """Return the reference time for row ages: `now`, unless the clock has jumped ahead.

        A jump while this process runs is detected by comparison with the time since boot. The new time is accepted
        after a day. A jump before this process started is detected as a gap of hours in the stored rows. The new time
        is accepted once half an hour of rows has been stored after the gap.
        """
        boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        wall, at = self._clocks or (now, boot)
        steady = wall + boot - at
        if now <= steady + JUMP_S or boot - at > DOUBTED_S:
            self._clocks, steady = (now, boot), now
        newest = "SELECT max(minute) FROM gpu_minutes WHERE host = ? AND gpu_index = ? AND minute <= ?"
        until = (steady - STORED_S) // MINUTE_S
        found = [db.execute(newest, (self._host, index, until)).fetchone()[0] for index in indices(db, self._host)]
        before = max((minute * MINUTE_S for minute in found if minute is not None), default=steady)
        return before if before < steady - STORED_S - UNRECORDED_S else steady

    def _delete_range(
        self, db: sqlite3.Connection, table: str, key: str, index: int, before: float, unit: int
    ) -> Iterator[None]:
        """Delete rows in batches, because the log for a single transaction would be as large as all deleted rows."""
        rows = f"FROM {table} WHERE host = ? AND gpu_index = ? AND {key} < ?"
        far = f"SELECT {key} {rows} ORDER BY {key} LIMIT 1 OFFSET {BATCH_ROWS}"
        more = True
        while more:
            far_row = db.execute(far, (self._host, index, before)).fetchone()
            more = far_row is not None
            bound = min(before, (far_row[0] // unit + 1) * unit) if far_row is not None else before
            with transaction(db):
                db.execute(f"DELETE {rows}", (self._host, index, bound))
            yield

    def _shrink(self, db: sqlite3.Connection) -> Iterator[None]:
        """Return free pages to the file system if there are more than will soon be reused."""
        pages, free = _pragma(db, "page_count"), _pragma(db, "freelist_count")
        if _pragma(db, "auto_vacuum") == NO_AUTO_VACUUM:
            self._rebuild(db, pages, free)
            return
        if free <= max(SLACK * pages, SLACK_PAGES):
            return
        while free:
            db.execute(f"PRAGMA incremental_vacuum({BATCH_PAGES})").fetchall()
            yield
            still_free = _pragma(db, "freelist_count")
            if still_free >= free:
                break
            free = still_free
        _empty_log(db)

    def _rebuild(self, db: sqlite3.Connection, pages: int, free: int) -> None:
        """Rewrite a file from an earlier version once so that its pages can be freed; if that fails, keep it."""
        n_bytes = (pages - free) * _pragma(db, "page_size")
        worth = n_bytes <= SMALL_BYTES or free >= pages / 2
        if self._is_rebuilt or not worth or not _has_space(self._path.parent, n_bytes):
            return
        self._is_rebuilt = True
        with suppress(sqlite3.Error):
            db.execute("PRAGMA auto_vacuum=INCREMENTAL")
            db.execute("VACUUM")
            _empty_log(db)


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


def _empty_log(db: sqlite3.Connection) -> None:
    """Truncate the write-ahead log, unless a reader prevents it."""
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _has_space(folder: Path, n_bytes: int) -> bool:
    """Return whether `folder` and SQLite's temporary folder each have enough space to rewrite `n_bytes`."""
    places = [os.environ.get("SQLITE_TMPDIR"), os.environ.get("TMPDIR"), "/var/tmp", "/usr/tmp", "/tmp", "."]
    temporary = next(place for place in places if place and os.access(place, os.W_OK | os.X_OK))
    space = min(shutil.disk_usage(folder).free, shutil.disk_usage(temporary).free)
    return space >= 2 * n_bytes + SPARE_BYTES
