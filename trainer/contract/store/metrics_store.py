"""The store `runs/<id>/metrics.db`: the metrics, heartbeat and events for one run, written only by rank 0."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.store.database import as_text, explain_errors, open_reader, open_writer, transaction
from trainer.contract.store.follower import StoreFile
from trainer.contract.store.rows import DROPPED, Count, Event, Time, convert, readable
from trainer.contract.store.seeds import by_seeds, mean, names_layer, values_by_seed
from trainer.contract.store.twins import without_twins

# log2 of the steps per roll-up bucket: 64 steps at level 1, and 4,096 steps at level 2. With roll-ups, reading 10
# million rows for a plot takes 3 ms.
ROLLUP_SHIFTS = {1: 6, 2: 12}
# The largest stored value. Metrics are far smaller; squares or differences of values above this limit could overflow.
LARGEST = 1e100
# A run's training phases; the second applies if the run finishes early.
TRAINING, COOLING = "training", "cooling down"
# Phases at the end of a run: evaluating the exported SAEs, being finished, and waiting for disk space.
JUDGING, FINISHED, WAITING = "judging", "finished", "waiting for space"
# The phase, after all others, in which the last checkpoint and the SAE are uploaded; a number of bytes follows.
MIRRORING = "mirroring"
# Phases before the first step: loading the language model, compiling GPU kernels, and reading a stream's first rows.
LOADING_MODEL, COMPILING, READING = "loading the model", "compiling kernels", "reading rows"
_BEFORE_FIRST_STEP = ("resuming", LOADING_MODEL, "preparing")


def is_before_first_step(phase: str) -> bool:
    """Return whether a phase comes before the first step; a number may follow `COMPILING` and `READING`."""
    return phase in _BEFORE_FIRST_STEP or phase.startswith((COMPILING, READING))


def may_take_long(phase: str) -> bool:
    """Return whether a phase may last for any time without being considered hung."""
    return phase.startswith(("saving", WAITING, MIRRORING))


class MetricRow(msgspec.Struct, frozen=True):
    """A metric value; `rank` is 0 for values reduced over all ranks, and `timestamp` is None for the current time."""

    name: str
    step: int
    value: float
    rank: int = 0
    timestamp: float | None = None


class Point(msgspec.Struct, frozen=True):
    """A point on a curve: a metric value, or the mean, minimum and maximum over a bucket of steps."""

    step: int
    value: float | None
    low: float | None = None
    high: float | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    """A run's latest status report: its phase, its position, and the number of rows that were lost."""

    phase: str
    step: Count
    total_steps: Count
    tokens: Count
    timestamp: Time
    dropped: Count = 0

    def is_complete(self, total_steps: int) -> bool:
        """Return whether a run of `total_steps` steps has written all its results."""
        return self.phase.startswith((JUDGING, FINISHED, MIRRORING)) and self.step >= total_steps


class SeriesWriter:
    """Writes a run's metrics; used only by rank 0's progress thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = open_writer(path, "metrics")

    def write(
        self, rows: Iterable[MetricRow], heartbeat: Heartbeat | None = None, events: Iterable[Event] = ()
    ) -> None:
        """Write all arguments in one transaction; NaN, infinities and values beyond `LARGEST` are stored as null."""
        now = time.time()
        with explain_errors(self.path), transaction(self._db) as db:
            rows = list(rows)
            keys = _key_ids(db, {row.name for row in rows})
            stored = [
                (
                    keys[row.name],
                    row.rank,
                    row.step,
                    now if row.timestamp is None else row.timestamp,
                    _finite(row.value),
                )
                for row in rows
            ]
            db.executemany("INSERT OR REPLACE INTO metrics VALUES(?, ?, ?, ?, ?)", stored)
            _roll_up(db, {(key, rank, step) for key, rank, step, _, _ in stored})
            if heartbeat:
                db.execute(
                    "INSERT OR REPLACE INTO heartbeat(id, phase, step, total_steps, tokens, timestamp, dropped)"
                    " VALUES(1, ?, ?, ?, ?, ?, ?)",
                    msgspec.structs.astuple(heartbeat),
                )
            db.executemany(
                "INSERT INTO events(timestamp, level, kind, message) VALUES(?, ?, ?, ?)",
                [msgspec.structs.astuple(event) for event in events],
            )

    def rewind(self, heartbeat: Heartbeat, keep: Sequence[str] = ()) -> None:
        """Delete all rows after the heartbeat's step to keep later values from earlier attempts out of the curves.

        Rows of the series in `keep` are kept.
        """
        others = f"key_id NOT IN (SELECT id FROM keys WHERE name IN ({', '.join('?' * len(keep))}))"
        with explain_errors(self.path), transaction(self._db) as db:
            db.execute(f"DELETE FROM metrics WHERE step > ? AND {others}", (heartbeat.step, *keep))
            for level, shift in ROLLUP_SHIFTS.items():
                bucket = heartbeat.step >> shift
                db.execute(f"DELETE FROM rollups WHERE level = ? AND bucket >= ? AND {others}", (level, bucket, *keep))
            _note_rewind(db, heartbeat.step)
            # The first step of the coarsest bucket that lost rows. Rewriting one row of a bucket recomputes the bucket.
            first = heartbeat.step >> max(ROLLUP_SHIFTS.values()) << max(ROLLUP_SHIFTS.values())
            newest = db.execute(_NEWEST, (first,))
            rewritten = [
                MetricRow(name, step, math.nan if (number := _finite(value)) is None else number, rank)
                for name, step, value, rank in newest
                if isinstance(name, str) and isinstance(rank, int)
            ]
        self.write(rewritten, heartbeat)

    def clear(self) -> None:
        """Delete all metric rows; keep the heartbeat and the events."""
        with explain_errors(self.path), transaction(self._db) as db:
            for table in ("metrics", "rollups", "keys"):
                db.execute(f"DELETE FROM {table}")
            _note_rewind(db, 0)

    def roll_up_missing(self) -> None:
        """Rebuild missing roll-ups in batches; they are missing if, for example, another program wrote the rows."""
        with explain_errors(self.path):
            keys = {row["name"]: row["id"] for row in self._db.execute("SELECT id, name FROM keys")}
            for key, rank in [(keys[row["name"]], row["rank"]) for row in self._db.execute(_SERIES)]:
                for (bucket,) in self._db.execute(_MISSING, {"key": key, "rank": rank}).fetchall():
                    begin, end = bucket << ROLLUP_SHIFTS[2], (bucket + 1) << ROLLUP_SHIFTS[2]
                    with transaction(self._db) as db:
                        _roll_up(db, {(key, rank, step) for step in range(begin, end, 1 << ROLLUP_SHIFTS[1])})

    def abandon(self) -> None:
        """Close the store without waiting for a lock, and without writing to a missing or corrupt file."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def close(self) -> None:
        """Close the store after moving the write-ahead log into it, leaving a single file that can be copied."""
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()


class SeriesReader:
    """Reads a run's metrics while they are being written; with a WAL, a reader never waits for the writer.

    Invalid rows and values, which `SeriesWriter` never writes, are skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = StoreFile(path, self._open)
        self._file.connection()

    def close(self) -> None:
        self._file.close()

    def version(self) -> tuple[int, int]:
        """Return a value that changes when the run writes to the store or when the store's file is replaced."""
        return self._file.version()

    def restarts(self) -> tuple[int, int]:
        """Return a value that changes when points may have been deleted, which makes points read earlier invalid."""
        with explain_errors(self.path):
            # A store from an older version has no such table until the run is resumed.
            known = self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'rewinds'").fetchone()
            last = self._db.execute("SELECT max(id) FROM rewinds").fetchone()[0] if known else None
        return self._file.times_opened, last or 0

    @property
    def _db(self) -> sqlite3.Connection:
        return self._file.connection()

    def _open(self) -> sqlite3.Connection:
        connection = open_reader(self.path, "metrics")
        connection.text_factory = as_text
        return connection

    def heartbeat(self) -> Heartbeat | None:
        with explain_errors(self.path):
            row = self._db.execute(
                "SELECT phase, step, total_steps, tokens, timestamp, dropped FROM heartbeat"
            ).fetchone()
        with contextlib.suppress(ValueError):
            return convert(dict(row), Heartbeat) if row else None
        return None

    def series(self) -> list[tuple[str, int]]:
        """Return the series that have values, as pairs (name, rank)."""
        with explain_errors(self.path):
            pairs = [(row["name"], row["rank"]) for row in self._db.execute(_SERIES)]
        return [(name, rank) for name, rank in pairs if isinstance(name, str) and isinstance(rank, int)]

    def points(self, name: str, rank: int = 0, *, after: int = -1) -> list[Point]:
        """Return all values in a series at steps after `after`."""
        query = (
            "SELECT step, value FROM metrics WHERE key_id = (SELECT id FROM keys WHERE name = ?)"
            f" AND rank = ? AND step BETWEEN ? AND {_LAST_STEP} ORDER BY step"
        )
        with explain_errors(self.path):
            rows = self._db.execute(query, (name, rank, max(0, after + 1)))
            return [Point(row["step"], _finite(row["value"])) for row in rows if isinstance(row["step"], int)]

    def history(self, name: str, rank: int = 0, *, most: int = 500) -> list[Point]:
        """Return a series without nulls; if it has more than `most` points, return means over buckets of 2^n steps."""
        series = {"name": name, "rank": rank}
        with explain_errors(self.path):
            first, last = self._db.execute(_EXTENT, series).fetchone()
            if first is None:
                return []
            rolled_up = self._is_rolled_up(series)
            counted = _N_ROLLED_UP if rolled_up else _N_OF_ROWS
            n = self._db.execute(counted, series | {"most": most + 1}).fetchone()[0]
            if not n:
                return []
            # Bucket widths are powers of two, so that buckets nest: the earlier points on a growing curve change only
            # when the curve doubles in length.
            first, last = int(first), int(last)
            shift = ((last - first) // most).bit_length() if n > most else 0
            level = max((level for level, fine in ROLLUP_SHIFTS.items() if fine <= shift and rolled_up), default=0)
            query = _BUCKETS_OF_ROLLUPS if level else _BUCKETS_OF_ROWS
            coarser = shift - ROLLUP_SHIFTS.get(level, 0)
            rows = self._db.execute(query, series | {"level": level, "shift": coarser}).fetchall()
        rows = [row for row in rows if _finite(row["mean"]) is not None]
        if not shift:
            return [Point(row["wide"], row["mean"]) for row in rows]
        middles = (min(max((row["wide"] << shift) + (1 << shift - 1), first), last) for row in rows)
        return [Point(step, row["mean"], row["low"], row["high"]) for step, row in zip(middles, rows, strict=True)]

    def is_rolled_up(self) -> bool:
        """Return whether all series have roll-ups; without them, reading a long history takes 1 s per million rows."""
        with explain_errors(self.path):
            return all(self._is_rolled_up({"name": name, "rank": rank}) for name, rank in self.series())

    def _is_rolled_up(self, series: Mapping[str, Any]) -> bool:
        key = self._db.execute("SELECT id FROM keys WHERE name = ?", (series["name"],)).fetchone()[0]
        return self._db.execute(_MISSING, {"key": key, "rank": series["rank"]}).fetchone() is None

    def timestamps(self, name: str, steps: Iterable[int], rank: int = 0) -> list[float | None]:
        """Return the Unix time of the first row at or after each step, or None if there is no such row."""
        with explain_errors(self.path):
            key = self._db.execute("SELECT id FROM keys WHERE name = ?", (name,)).fetchone()
            rows = [self._db.execute(_WRITTEN, (key and key[0], rank, step)).fetchone() for step in steps]
        return [_finite(row[0]) if row else None for row in rows]

    def timed_values(self, name: str, rank: int = 0) -> Iterator[tuple[int, float, float | None]]:
        """Yield the values in a series as tuples (step, timestamp, value); rows are read lazily."""
        query = f"SELECT step, timestamp, value FROM metrics WHERE {_WHOSE} AND {_STEPS} ORDER BY step"
        with explain_errors(self.path):
            for step, timestamp, value in self._db.execute(query, {"name": name, "rank": rank}):
                if isinstance(step, int):
                    yield step, _finite(timestamp) or 0.0, _finite(value)

    def latest(self, rank: int = 0) -> dict[str, float]:
        """Return the latest value of each of a rank's series, by name; omit series whose latest value is null."""
        newest = f"SELECT value FROM metrics WHERE key_id = id AND rank = ? AND {_STEPS} ORDER BY step DESC LIMIT 1"
        query = f"SELECT name, ({newest}) AS value FROM keys"
        with explain_errors(self.path):
            values = [(row["name"], _finite(row["value"])) for row in self._db.execute(query, (rank,))]
        return {name: value for name, value in values if value is not None and isinstance(name, str)}

    def events(self) -> list[Event]:
        with explain_errors(self.path):
            rows = self._db.execute("SELECT timestamp, level, kind, message FROM events ORDER BY id").fetchall()
        return list(readable([dict(row) for row in rows], Event))

    def newest_event(self, kinds: Sequence[str]) -> Event | None:
        """Return the latest event of one of the given kinds, or None if it is missing or unreadable."""
        chosen = f"SELECT * FROM events WHERE kind IN ({', '.join('?' * len(kinds))}) ORDER BY id DESC LIMIT 1"
        with explain_errors(self.path):
            rows = self._db.execute(chosen, kinds).fetchall()
        return next(readable([dict(row) for row in rows], Event), None)


def best_sae(latest: Mapping[str, float]) -> str:
    """Return the label of the SAE with the lowest FVU in a sweep; "" for a run with one SAE or before any measurement.

    The layers of a cross-layer transcoder are one SAE.

    The held-out FVU is used if any SAE has one, otherwise the FVU on the last batches. SAEs that differ only in the
    seed are compared by their mean FVU, and the lowest seed is returned. A group with an SAE that has no FVU, because
    its training failed, comes after complete groups. Random twins and dropped SAEs do not count.
    """
    fvu = _of_saes(latest, "heldout_fvu") or _of_saes(latest, "fvu")
    if any(map(names_layer, fvu)):
        return ""
    dropped = _of_saes(latest, DROPPED)
    known_labels = dict.fromkeys(key.partition("@")[2] for key in latest if "@" in key)
    labels = [label for label in without_twins(known_labels) if label not in dropped]
    known = by_seeds(labels)

    def rank(group: str) -> tuple[bool, float]:
        return len(measured[group]) < len(known[group]), mean([fvu[label] for label in measured[group]])

    measured = by_seeds([label for label in labels if label in fvu])
    return measured[min(measured, key=rank)][0] if measured else ""


def _of_saes(latest: Mapping[str, float], name: str) -> dict[str, float]:
    """Return a dict mapping each SAE's label to the latest value of a metric."""
    return {key.removeprefix(f"{name}@"): value for key, value in latest.items() if key.startswith(f"{name}@")}


def value_of_sae(latest: Mapping[str, float], name: str, label: str) -> float | None:
    """Return the latest value of a metric for one SAE in a sweep, or for the run if all SAEs share the metric.

    For SAEs that differ only in the seed, and for the layers of a cross-layer transcoder, return their mean.
    """
    of_layers = [value for one, value in _of_saes(latest, name).items() if not label and names_layer(one)]
    if of_layers:
        return mean(of_layers)
    if label and any(other.startswith(f"{name}@") for other in latest):
        values = values_by_seed(latest, name, label)
        return mean(values.values()) if values else None
    return latest.get(name)


# This query jumps from one rank of a key to the next; DISTINCT would read all rows.
_SERIES = (
    "WITH RECURSIVE found(id, rank) AS (SELECT id, (SELECT min(rank) FROM metrics WHERE key_id = id) FROM keys"
    " UNION ALL SELECT id, (SELECT min(rank) FROM metrics WHERE key_id = found.id AND rank > found.rank) FROM found"
    " WHERE rank IS NOT NULL)"
    " SELECT name, rank FROM found JOIN keys USING(id) WHERE rank IS NOT NULL ORDER BY name, rank"
)
# SQLite sorts text and blobs after all numbers, and null before all numbers, so these bounds exclude text, blobs and
# null.
_LAST_STEP = 2**62
_STEPS = f"step BETWEEN 0 AND {_LAST_STEP}"
_VALUES = f"value BETWEEN {-LARGEST} AND {LARGEST}"
_WHOSE = "key_id = (SELECT id FROM keys WHERE name = :name) AND rank = :rank"
_EXTENT = (
    f"SELECT (SELECT min(step) FROM metrics WHERE {_WHOSE} AND {_STEPS}),"
    f" (SELECT max(step) FROM metrics WHERE {_WHOSE} AND {_STEPS})"
)
_N_ROLLED_UP = f"SELECT total(n) FROM rollups WHERE {_WHOSE} AND level = 2"
_N_OF_ROWS = f"SELECT count(*) FROM (SELECT 1 FROM metrics WHERE {_WHOSE} AND {_STEPS} AND {_VALUES} LIMIT :most)"
# Finds level-2 buckets with rows but without a roll-up or with an incomplete level 1. The query jumps from bucket to
# bucket, which takes 5 ms for 10 million rows.
_MISSING = (
    "WITH RECURSIVE found(bucket) AS ("
    f"SELECT min(step) >> 12 FROM metrics WHERE key_id = :key AND rank = :rank AND {_STEPS}"
    " UNION ALL SELECT (SELECT min(step) >> 12 FROM metrics WHERE key_id = :key AND rank = :rank"
    f" AND step BETWEEN found.bucket + 1 << 12 AND {_LAST_STEP}) FROM found WHERE bucket IS NOT NULL)"
    " SELECT bucket FROM found WHERE bucket IS NOT NULL AND ("
    "SELECT n FROM rollups WHERE key_id = :key AND rank = :rank AND level = 2 AND rollups.bucket = found.bucket"
    ") IS NOT (SELECT CAST(total(n) AS INTEGER) FROM rollups WHERE key_id = :key AND rank = :rank AND level = 1"
    " AND rollups.bucket BETWEEN found.bucket << 6 AND (found.bucket << 6) + 63)"
)
_BUCKETS_OF_ROWS = (
    "SELECT step >> :shift AS wide, avg(value) AS mean, min(value) AS low, max(value) AS high FROM metrics"
    f" WHERE {_WHOSE} AND {_STEPS} AND {_VALUES} GROUP BY 1 ORDER BY 1"
)
_BUCKETS_OF_ROLLUPS = (
    "SELECT bucket >> :shift AS wide, total(total) / total(n) AS mean, min(low) AS low, max(high) AS high FROM rollups"
    f" WHERE {_WHOSE} AND level = :level AND bucket BETWEEN 0 AND {2**56} AND n BETWEEN 1 AND 4096"
    f" AND total BETWEEN {-4096 * LARGEST} AND {4096 * LARGEST} AND low BETWEEN {-LARGEST} AND {LARGEST}"
    f" AND high BETWEEN {-LARGEST} AND {LARGEST} GROUP BY 1 ORDER BY 1"
)
_WRITTEN = "SELECT timestamp FROM metrics WHERE key_id = ? AND rank = ? AND step >= ? ORDER BY step LIMIT 1"
_FROM_ROWS = (
    "SELECT count(value), sum(value), min(value), max(value) FROM metrics"
    " WHERE key_id = ? AND rank = ? AND step >= ? AND step < ?"
)
_FROM_LEVEL_1 = (
    "SELECT CAST(total(n) AS INTEGER), sum(total), min(low), max(high) FROM rollups"
    " WHERE key_id = ? AND rank = ? AND level = 1 AND bucket >= ? AND bucket < ?"
)

_NEWEST = (
    "SELECT name, max(step) AS step, value, rank FROM metrics JOIN keys ON key_id = id"
    f" WHERE step BETWEEN ? AND {_LAST_STEP}"
    " GROUP BY key_id, rank"
)


def _note_rewind(db: sqlite3.Connection, step: int) -> None:
    db.execute("INSERT INTO rewinds(timestamp, step) VALUES(?, ?)", (time.time(), step))


def _key_ids(db: sqlite3.Connection, names: set[str]) -> dict[str, int]:
    """Add new names and return a dict mapping every name to its id.

    The ids are not cached, because a failed write rolls back its new names.
    """
    db.executemany("INSERT OR IGNORE INTO keys(name) VALUES(?)", [(name,) for name in sorted(names)])
    return {row["name"]: row["id"] for row in db.execute("SELECT id, name FROM keys")}


def _roll_up(db: sqlite3.Connection, touched: set[tuple[int, int, int]]) -> None:
    """Recompute the buckets for the `touched` tuples (key, rank, step) from rows, so that no step counts twice."""
    for level, source, width in ((1, _FROM_ROWS, 1 << ROLLUP_SHIFTS[1]), (2, _FROM_LEVEL_1, 64)):
        shift = ROLLUP_SHIFTS[level]
        for key, rank, bucket in {(key, rank, step >> shift) for key, rank, step in touched}:
            sums = db.execute(source, (key, rank, bucket * width, (bucket + 1) * width)).fetchone()
            db.execute(
                "INSERT OR REPLACE INTO rollups VALUES(?, ?, ?, ?, ?, ?, ?, ?)", (key, rank, level, bucket, *sums)
            )


def _finite(value: Any) -> float | None:
    """Return a value as a float, or None if it is not a number or exceeds `LARGEST`."""
    return float(value) if isinstance(value, int | float) and -LARGEST <= value <= LARGEST else None
