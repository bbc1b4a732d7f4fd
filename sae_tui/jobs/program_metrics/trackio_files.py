"""Reads the metrics of runs from a Trackio database."""

from __future__ import annotations

import contextlib
import datetime
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from sae_tui.jobs.program_metrics.lines import numbers_in
from sae_tui.jobs.program_metrics.sources import FilePosition, FileValues

_COLUMNS = {"id", "timestamp", "run_name", "step", "metrics"}
_MOST_ROWS = 2000
# A query is interrupted after this many SQLite instructions; reading Trackio's own table never needs that many.
_MOST_INSTRUCTIONS = 5_000_000
_IS_TABLE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'metrics'"
_NEW_ROWS = (
    "SELECT id, timestamp, run_name, step, CAST(metrics AS TEXT) FROM metrics WHERE id > ? AND length(metrics) < 100000"
    f" ORDER BY id LIMIT {_MOST_ROWS}"
)


def read_trackio(path: Path, position: FilePosition) -> Iterator[FileValues]:
    """Yield the rows after the position that are not older than `since`; any other database counts as damaged."""
    try:
        with contextlib.closing(_open(path)) as db:
            if not _is_trackio(db):
                position.is_damaged = _has_tables(db)
                return
            rows = db.execute(_NEW_ROWS, (position.place,)).fetchall()
    except sqlite3.OperationalError:
        return  # It is locked, or still being created.
    except sqlite3.Error:
        position.is_damaged = True
        return
    for number, timestamp, run, step, text in rows:
        position.place = number
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            if _seconds(timestamp) >= position.since:
                yield FileValues(int(step), dict(numbers_in(json.loads(text))), str(run))


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=0.2)
    db.set_progress_handler(lambda: 1, _MOST_INSTRUCTIONS)
    db.execute("PRAGMA trusted_schema = OFF")
    return db


def _is_trackio(db: sqlite3.Connection) -> bool:
    # Accept only a table, because a view's query could run forever.
    if db.execute(_IS_TABLE).fetchone() is None:
        return False
    return {row[1] for row in db.execute("PRAGMA table_info(metrics)")} >= _COLUMNS


def _has_tables(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None


def _seconds(timestamp: str) -> float:
    """Convert an ISO 8601 time to seconds since the epoch; Trackio writes UTC, with or without an offset."""
    when = datetime.datetime.fromisoformat(timestamp)
    return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()
