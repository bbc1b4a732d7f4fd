"""Reading `gpu.db`: samples of a card by its UUID, and their means per step, wherever the card was plugged in."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sae_tui.gpu.base import Degrees, Measured
from sae_tui.gpu.ring import Reading
from trainer.contract.store.database import as_text, explained, open_reader
from trainer.contract.store.rows import Count, FewAtOnce, JobId, Time, readable

MINUTE_S = 60
# A piece is read to its end before it is handed on: a reader that holds a statement open for as long as somebody
# looks at its output keeps the write-ahead log from being emptied.
WINDOW_S = 3600
NEVER = 1 << 40
MOST_CARDS = 100_000
# How far a clock may have been ahead: what is stored of later times is not waited for.
AHEAD_S = 7 * 86_400
Number = TypeVar("Number", int, float)

# The rows are kept by index, since no two cards have one at the same time; which card had it when, the UUID says.
# CROSS JOIN keeps SQLite to the order of the tables, so that each place is a range of the primary key.
PLACES = (
    "WITH places AS (SELECT json_extract(value, '$[0]') AS gpu_index, json_extract(value, '$[1]') AS sample_begin,"
    " json_extract(value, '$[2]') AS sample_end, json_extract(value, '$[3]') AS minute_begin,"
    " json_extract(value, '$[4]') AS minute_end FROM json_each(:places)), "
    "samples AS (SELECT gpu_index, timestamp, gpu_uuid, 1 AS n, utilization, memory_used, memory_total, temperature,"
    " power_draw, job_id FROM places CROSS JOIN gpu_metrics USING (gpu_index) WHERE host = :host"
    " AND timestamp >= max(:begin, sample_begin) AND timestamp < min(:end, sample_end)"
    " AND gpu_uuid = ifnull(:uuid, gpu_uuid)), "
    "minutes AS (SELECT gpu_index, minute * 60.0 AS timestamp, gpu_uuid, n, utilization, memory_used, memory_total,"
    " temperature, power_draw, job_id FROM places CROSS JOIN gpu_minutes USING (gpu_index) WHERE host = :host"
    " AND minute >= max(:begin / 60, minute_begin) AND minute < min(:end / 60, minute_end)"
    " AND gpu_uuid = ifnull(:uuid, gpu_uuid)) "
)
SAMPLES = PLACES + "SELECT * FROM samples ORDER BY timestamp"
ROWS = PLACES + "SELECT * FROM samples UNION ALL SELECT * FROM minutes ORDER BY timestamp"


def _mean(name: str) -> str:
    return f"sum(1.0 * n * {name}) / sum(1.0 * n * ({name} IS NOT NULL))"


STEPS = PLACES + (
    "SELECT gpu_index, CAST(timestamp / :step AS INTEGER) * :step AS begin, gpu_uuid, CAST(total(n) AS INTEGER),"
    f" round({_mean('utilization')}, 2), CAST({_mean('memory_used')} AS INTEGER), max(memory_total),"
    f" CAST(round({_mean('temperature')}) AS INTEGER), round({_mean('power_draw')}, 2), max(job_id)"
    " FROM (SELECT * FROM samples UNION ALL SELECT * FROM minutes) GROUP BY gpu_uuid, begin ORDER BY begin, gpu_index"
)
LAST_BUSY = (
    "SELECT max(minute), max(CASE WHEN utilization_max > :above THEN minute END) FROM gpu_minutes"
    f" WHERE host = :host AND gpu_index = :gpu AND minute BETWEEN :first AND {NEVER} AND gpu_uuid = :uuid"
)


class StoredSample(NamedTuple):
    """A row of the history: a sample, or the means of `samples` of them, whose time then begins at `timestamp`."""

    gpu_index: FewAtOnce
    timestamp: Time
    gpu_uuid: str
    samples: Count
    utilization: Measured | None
    memory_used_bytes: Count | None
    memory_total_bytes: Count | None
    temperature_c: Degrees | None
    power_w: Measured | None
    job_id: JobId | None


class Totals(NamedTuple):
    """A step of all cards: sums and means over those that have the sensor, of the `gpus_counted` with a sample."""

    timestamp: float
    gpus_counted: int
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    average_utilization: float | None
    max_temperature_c: int | None
    power_w: float | None


def recent(path: Path, host: str, seconds: float) -> dict[str, list[Reading]]:
    """The last samples of each card up to now, by UUID, to fill the rings."""
    if not path.exists():
        return {}
    now = time.time()
    found: dict[str, list[Reading]] = defaultdict(list)
    with explained(path), closing(_opened(path)) as db:
        places = _places(db, host)
        for row in _read(db, SAMPLES, host, places, now - seconds, now + MINUTE_S):
            found[row.gpu_uuid].append(Reading(*(getattr(row, name) for name in Reading._fields)))
    return dict(found)


def stored(
    path: Path, host: str, begin: float, *, uuid: str | None = None, step_s: int | None = None
) -> Iterator[StoredSample]:
    """The history of a card, or of all, since a time, oldest first; means of minutes where samples are gone.

    With a step the means of each, the first of which may begin earlier. However much it is, only an hour of it, or
    one step, is in memory.
    """
    with explained(path), closing(_opened(path)) as db:
        oldest, newest = _span(db, host)
        begin = max(begin, oldest)
        if step_s:
            begin = begin // step_s * step_s
        places = _places(db, host, begin, uuid, minutes=step_s is not None and step_s % MINUTE_S == 0)
        window = -(-WINDOW_S // step_s) * step_s if step_s else WINDOW_S
        while begin <= newest:
            yield from _read(db, STEPS if step_s else ROWS, host, places, begin, begin + window, uuid, step_s)
            begin += window


def totals(rows: Iterable[StoredSample]) -> Iterator[Totals]:
    """The steps of all cards, in order of time, as one line."""
    for timestamp, each in groupby(rows, attrgetter("timestamp")):
        cards = list(each)
        busy = _known(card.utilization for card in cards)
        power = _known(card.power_w for card in cards)
        yield Totals(
            timestamp,
            len(cards),
            sum(used) if (used := _known(card.memory_used_bytes for card in cards)) else None,
            # Out of what those hold that are in the sum.
            sum(_known(card.memory_total_bytes for card in cards if card.memory_used_bytes is not None)) or None,
            round(sum(busy) / len(busy), 2) if busy else None,
            max(_known(card.temperature_c for card in cards), default=None),
            round(sum(power), 2) if power else None,
        )


def last_busy(path: Path, host: str, index: int, uuid: str, after: float, above: int = 5) -> float | None:
    """When the utilisation of a card was last above some percent, or `after` where it was not since then.

    None where nothing is known: no history of that time, or of the last minutes.
    """
    if not path.exists():
        return None
    asked = {"host": host, "gpu": index, "uuid": uuid, "first": after // MINUTE_S + 1, "above": above}
    with explained(path), closing(_opened(path)) as db:
        newest, busiest = db.execute(LAST_BUSY, asked).fetchone()
    if newest is None or time.time() - newest * MINUTE_S > 3 * MINUTE_S:
        return None
    return after if busiest is None else (busiest + 1) * MINUTE_S


def indices(db: sqlite3.Connection, host: str) -> list[int]:
    """The indices that cards of a host have had, hopping along the primary keys instead of reading the tables."""
    found: set[int] = set()
    for table in ("gpu_minutes", "gpu_metrics"):
        query = f"SELECT min(gpu_index) FROM {table} WHERE host = ? AND gpu_index > ? AND gpu_index < {MOST_CARDS}"
        index = -1
        while (index := db.execute(query, (host, index)).fetchone()[0]) is not None:
            found.add(index)
    return sorted(found)


def _places(
    db: sqlite3.Connection, host: str, begin: float = 0.0, uuid: str | None = None, *, minutes: bool = False
) -> str:
    """The indices, as JSON, at which a card, or any, was, each with the times of its samples and of its minutes.

    Of a time that has both it is the samples that are read, or the minutes, which are sixty times fewer.
    """
    held = "SELECT EXISTS(SELECT 1 FROM gpu_minutes WHERE host = ? AND gpu_index = ? AND minute >= ? AND gpu_uuid = ?)"
    places: list[tuple[float, ...]] = []
    for index in indices(db, host):
        if uuid is not None and not db.execute(held, (host, index, begin // MINUTE_S, uuid)).fetchone()[0]:
            continue
        if minutes:
            split = _end(db, host, index, "min", "gpu_minutes", "minute", NEVER)
            places.append((index, 0, split * MINUTE_S, split, NEVER))
        else:
            split = _end(db, host, index, "min", "gpu_metrics", "timestamp", NEVER)
            places.append((index, split, NEVER, 0, split // MINUTE_S))
    return json.dumps(places)


def _span(db: sqlite3.Connection, host: str) -> tuple[float, float]:
    """The times of the oldest and the newest row."""
    found = indices(db, host)
    tables = (("gpu_minutes", "minute", MINUTE_S), ("gpu_metrics", "timestamp", 1))
    oldest = [_end(db, host, i, "min", table, key, NEVER) * unit for table, key, unit in tables for i in found]
    newest = [_end(db, host, i, "max", table, key, 0) * unit for table, key, unit in tables for i in found]
    return min(oldest, default=0.0), min(max(newest, default=0.0), time.time() + AHEAD_S)


def _end(db: sqlite3.Connection, host: str, index: int, which: str, table: str, key: str, default: float) -> float:
    # Text comes after all numbers to SQLite.
    query = f"SELECT {which}({key}) FROM {table} WHERE host = ? AND gpu_index = ? AND {key} BETWEEN 0 AND {NEVER}"
    found: float | None = db.execute(query, (host, index)).fetchone()[0]
    return default if found is None else found


def _read(
    db: sqlite3.Connection, query: str, host: str, places: str, begin: float, end: float,
    uuid: str | None = None, step_s: int | None = None,
) -> list[StoredSample]:  # fmt: skip
    asked: dict[str, Any] = {
        "host": host, "places": places, "begin": begin, "end": end, "uuid": uuid, "step": step_s,
    }  # fmt: skip
    return list(readable(db.execute(query, asked).fetchall(), StoredSample))


def _opened(path: Path) -> sqlite3.Connection:
    db = open_reader(path, "gpu")
    db.row_factory = None
    db.text_factory = as_text
    return db


def _known(values: Iterable[Number | None]) -> list[Number]:
    return [value for value in values if value is not None]
