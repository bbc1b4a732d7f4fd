"""Reads GPU samples and their per-step means from `gpu.db`.

A GPU is identified by its UUID because its index may change.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sae_tui.gpu.base import Degrees, GpuSummary, Measured
from sae_tui.gpu.energy import EnergyReading
from sae_tui.gpu.ring import RingReading, reading_of
from trainer.contract.store.database import as_text, explain_errors, open_reader
from trainer.contract.store.rows import Count, FewAtOnce, JobId, Time, readable

MINUTE_S = 60
# The history is read in windows of this length, and all rows in a window are read before the first is yielded. A
# statement left open while a user pages through the output would prevent the write-ahead log from being truncated.
WINDOW_S = 3600
NEVER = 1 << 40
MOST_GPUS = 100_000
# Rows further in the future than this were written while the clock was wrong, and are ignored.
AHEAD_S = 7 * 86_400
Number = TypeVar("Number", int, float)

# The primary key contains the GPU index; an index belongs to one GPU at a time. The UUID identifies that GPU. Each row
# of `places` is a GPU index with the time ranges to read. CROSS JOIN preserves the table order so that each row of
# `places` becomes a range of the primary key.
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
    """Return SQL for a column's mean, weighted by the number of samples `n`."""
    return f"sum(1.0 * n * {name}) / sum(1.0 * n * ({name} IS NOT NULL))"


STEPS = PLACES + (
    "SELECT gpu_index, CAST(timestamp / :step AS INTEGER) * :step AS begin, gpu_uuid, CAST(total(n) AS INTEGER),"
    f" round({_mean('utilization')}, 2), CAST({_mean('memory_used')} AS INTEGER), max(memory_total),"
    f" CAST(round({_mean('temperature')}) AS INTEGER), round({_mean('power_draw')}, 2), max(job_id)"
    " FROM (SELECT * FROM samples UNION ALL SELECT * FROM minutes) GROUP BY gpu_uuid, begin ORDER BY begin, gpu_index"
)
ENERGY = (
    "SELECT timestamp, power_draw, energy FROM gpu_metrics WHERE host = ? AND gpu_index = ?"
    " AND timestamp > ? AND timestamp <= ? AND gpu_uuid = ? ORDER BY timestamp"
)
LAST_BUSY = (
    "SELECT max(CASE WHEN utilization_max IS NOT NULL THEN minute END),"
    " max(CASE WHEN utilization_max > :above THEN minute END) FROM gpu_minutes"
    f" WHERE host = :host AND gpu_index = :gpu AND minute BETWEEN :first AND {NEVER} AND gpu_uuid = :uuid"
)


class StoredSample(NamedTuple):
    """A history row: a sample, or the mean of several samples; `samples` is the number of samples.

    A mean's `timestamp` is the start of its time step.
    """

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


# The sensors whose values are stored.
STORED = ("utilization", "memory_used_bytes", "memory_total_bytes", "temperature_c", "power_w")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTotals(GpuSummary):
    """Totals over all GPUs for one time step; `gpus_counted` is the number of GPUs with a sample."""

    timestamp: float
    gpus_counted: int


def recent(path: Path, host: str, seconds: float) -> dict[str, list[RingReading]]:
    """Return a dict mapping each GPU's UUID to its samples from the last `seconds`."""
    if not path.exists():
        return {}
    now = time.time()
    readings: dict[str, list[RingReading]] = defaultdict(list)
    with explain_errors(path), closing(_open(path)) as db:
        places = _places(db, host)
        for row in _read(db, SAMPLES, host, places, now - seconds, now + MINUTE_S):
            readings[row.gpu_uuid].append(reading_of(row))
    return dict(readings)


def stored_samples(
    path: Path, host: str, begin: float, *, uuid: str | None = None, step_s: int | None = None
) -> Iterator[StoredSample]:
    """Yield the history of one GPU, or of all GPUs, since `begin`, oldest first; minute means replace deleted samples.

    With `step_s`, yield the mean for each time step; the first step may start before `begin`. At most one hour of
    history (or one step, if longer) is in memory at a time.
    """
    with explain_errors(path), closing(_open(path)) as db:
        oldest, newest = _span(db, host)
        begin = max(begin, oldest)
        if step_s:
            begin = begin // step_s * step_s
        places = _places(db, host, begin, uuid, minutes=step_s is not None and step_s % MINUTE_S == 0)
        window = -(-WINDOW_S // step_s) * step_s if step_s else WINDOW_S
        while begin <= newest:
            yield from _read(db, STEPS if step_s else ROWS, host, places, begin, begin + window, uuid, step_s)
            begin += window


def totals(rows: Iterable[StoredSample]) -> Iterator[GpuTotals]:
    """Combine chronologically sorted rows from all GPUs into one row per time step."""
    for timestamp, each in groupby(rows, attrgetter("timestamp")):
        gpus = list(each)
        busy = _not_none(gpu.utilization for gpu in gpus)
        power = _not_none(gpu.power_w for gpu in gpus)
        yield GpuTotals(
            timestamp=timestamp,
            gpus_counted=len(gpus),
            total_memory_used_bytes=sum(used) if (used := _not_none(gpu.memory_used_bytes for gpu in gpus)) else None,
            # Include a GPU's total memory in the sum only if its used memory is included too.
            total_memory_total_bytes=sum(
                _not_none(gpu.memory_total_bytes for gpu in gpus if gpu.memory_used_bytes is not None)
            )
            or None,
            average_utilization=round(sum(busy) / len(busy), 2) if busy else None,
            max_temperature_c=max(_not_none(gpu.temperature_c for gpu in gpus), default=None),
            total_power_w=round(sum(power), 2) if power else None,
        )


def last_busy(path: Path, host: str, index: int, uuid: str, after: float, above: int = 5) -> float | None:
    """Return when a GPU's utilisation last exceeded `above` percent, or `after` if it has not done so since then.

    Return None if this is unknown because no utilisation has been stored since `after` or in the last three minutes.
    For example, slices do not report their utilisation.
    """
    if not path.exists():
        return None
    asked = {"host": host, "gpu": index, "uuid": uuid, "first": after // MINUTE_S + 1, "above": above}
    with explain_errors(path), closing(_open(path)) as db:
        newest, busiest = db.execute(LAST_BUSY, asked).fetchone()
    if newest is None or time.time() - newest * MINUTE_S > 3 * MINUTE_S:
        return None
    return after if busiest is None else (busiest + 1) * MINUTE_S


def energy_readings(
    path: Path, host: str, gpus: Iterable[tuple[int, str]], after: Mapping[str, float], until: float
) -> dict[str, list[EnergyReading]]:
    """Return a dict mapping each GPU's UUID to its energy readings after its time in `after`.

    Readings later than `until` are omitted. `gpus` contains pairs of index and UUID.
    """
    with explain_errors(path), closing(_open(path)) as db:
        return {
            uuid: list(readable(db.execute(ENERGY, (host, index, after[uuid], until, uuid)).fetchall(), EnergyReading))
            for index, uuid in gpus
        }


def indices(db: sqlite3.Connection, host: str) -> list[int]:
    """Return all GPU indices on a host; do one key lookup per index instead of scanning the tables."""
    all_indices: set[int] = set()
    for table in ("gpu_minutes", "gpu_metrics"):
        query = f"SELECT min(gpu_index) FROM {table} WHERE host = ? AND gpu_index > ? AND gpu_index < {MOST_GPUS}"
        index = -1
        while (index := db.execute(query, (host, index)).fetchone()[0]) is not None:
            all_indices.add(index)
    return sorted(all_indices)


def _places(
    db: sqlite3.Connection, host: str, begin: float = 0.0, uuid: str | None = None, *, minutes: bool = False
) -> str:
    """Return the `places` for a query as JSON: GPU indices, each with the time ranges of samples and minute means.

    If `uuid` is given, include only indices this GPU has had. For times covered by both tables, read the samples or, if
    `minutes`, the minute means. There are sixty times fewer minute means than samples.
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
    """Return the times of the oldest and the latest row; ignore times more than `AHEAD_S` in the future."""
    host_indices = indices(db, host)
    tables = (("gpu_minutes", "minute", MINUTE_S), ("gpu_metrics", "timestamp", 1))
    oldest = [_end(db, host, i, "min", table, key, NEVER) * unit for table, key, unit in tables for i in host_indices]
    newest = [_end(db, host, i, "max", table, key, 0) * unit for table, key, unit in tables for i in host_indices]
    return min(oldest, default=0.0), min(max(newest, default=0.0), time.time() + AHEAD_S)


def _end(db: sqlite3.Connection, host: str, index: int, which: str, table: str, key: str, default: float) -> float:
    """Return the smallest or largest key ("min" or "max") of a GPU index's rows, or `default` if it has no rows."""
    # The range excludes text keys, which SQLite sorts after all numbers.
    query = f"SELECT {which}({key}) FROM {table} WHERE host = ? AND gpu_index = ? AND {key} BETWEEN 0 AND {NEVER}"
    key_value: float | None = db.execute(query, (host, index)).fetchone()[0]
    return default if key_value is None else key_value


def _read(
    db: sqlite3.Connection, query: str, host: str, places: str, begin: float, end: float,
    uuid: str | None = None, step_s: int | None = None,
) -> list[StoredSample]:  # fmt: skip
    asked: dict[str, Any] = {
        "host": host, "places": places, "begin": begin, "end": end, "uuid": uuid, "step": step_s,
    }  # fmt: skip
    return list(readable(db.execute(query, asked).fetchall(), StoredSample))


def _open(path: Path) -> sqlite3.Connection:
    db = open_reader(path, "gpu")
    db.row_factory = None
    db.text_factory = as_text
    return db


def _not_none(values: Iterable[Number | None]) -> list[Number]:
    return [value for value in values if value is not None]
