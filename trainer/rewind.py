"""Takes a run's history back to the checkpoint it resumes from: what comes after is written anew."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

from trainer.contract.series import ROLLUP_SHIFTS, Heartbeat, Row, SeriesWriter
from trainer.contract.store import explained, open_writer, transaction
from trainer.manifest import Position

_NEWEST = (
    "SELECT name, max(step) AS step, value, rank FROM metrics JOIN keys ON key_id = id WHERE step >= ?"
    " GROUP BY key_id, rank"
)


def rewind(metrics_db: Path, position: Position, total_steps: int) -> None:
    """Forgets rows beyond the position, else the newest value of a curve would be of steps that are yet to come.

    Call it while nothing else writes there; raises `StoreError` where the store cannot be used.
    """
    if not metrics_db.exists():
        return
    with explained(metrics_db), contextlib.closing(open_writer(metrics_db, "metrics")) as connection:
        with transaction(connection) as db:
            db.execute("DELETE FROM metrics WHERE step > ?", (position.step,))
            for level, shift in ROLLUP_SHIFTS.items():
                db.execute("DELETE FROM rollups WHERE level = ? AND bucket >= ?", (level, position.step >> shift))
        # The coarsest bucket that was cut in two; writing a row again adds up its buckets from what is left.
        first = position.step >> max(ROLLUP_SHIFTS.values()) << max(ROLLUP_SHIFTS.values())
        left = [_row(*found) for found in connection.execute(_NEWEST, (first,))]
    beat = Heartbeat("resuming", position.step, total_steps, position.tokens, time.time())
    with contextlib.closing(SeriesWriter(metrics_db)) as writer:
        writer.write(left, beat)


def _row(name: str, step: int, value: float | None, rank: int) -> Row:
    return Row(name, step, math.nan if value is None else value, rank)
