"""`gpu.db`: what the GPUs of a host did before. One process per host writes it, whoever holds the file lock."""

from __future__ import annotations

import fcntl
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from sae_tui.gpu.ring import Reading
from sae_tui.gpu.sampler import Sampler
from trainer.contract.paths import DataDir, file_mode, private_folder
from trainer.contract.problems import UserError
from trainer.contract.store import explained, open_reader, open_writer, transaction

MINUTE_S = 60
RAW = (
    "SELECT gpu_index, timestamp, gpu_uuid, utilization, memory_used AS memory_used_bytes,"
    " memory_total AS memory_total_bytes, temperature AS temperature_c, power_draw AS power_w, job_id"
    " FROM gpu_metrics WHERE host = ? AND gpu_index = ? AND timestamp >= ? ORDER BY timestamp"
)
MINUTES = (
    "SELECT gpu_index, minute * 60.0 AS timestamp, gpu_uuid, utilization, memory_used AS memory_used_bytes,"
    " memory_total AS memory_total_bytes, temperature AS temperature_c, power_draw AS power_w, job_id"
    " FROM gpu_minutes WHERE host = ? AND gpu_index = ? AND minute >= ? AND minute < ? ORDER BY minute"
)
# From the rows themselves, so that a minute that two processes shared, or that is written twice, counts once.
ROLL_UP = (
    "INSERT OR REPLACE INTO gpu_minutes SELECT host, gpu_index, CAST(timestamp / 60 AS INTEGER) AS minute,"
    " max(gpu_uuid), count(*), avg(utilization), max(utilization), CAST(avg(memory_used) AS INTEGER),"
    " max(memory_total), CAST(round(avg(temperature)) AS INTEGER), avg(power_draw), max(job_id)"
    " FROM gpu_metrics WHERE host = ? AND gpu_index = ? AND timestamp >= ? GROUP BY host, gpu_index, minute"
)


LAST_BUSY = (
    "SELECT max(minute), max(CASE WHEN utilization_max > :above THEN minute END) FROM gpu_minutes"
    " WHERE host = :host AND gpu_index = :gpu AND minute >= :first"
)


@dataclass(frozen=True, slots=True)
class StoredSample:
    """A row of the history: a sample, or the means of a minute, which then begins at `timestamp`."""

    gpu_index: int
    timestamp: float
    gpu_uuid: str
    utilization: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_c: int | None
    power_w: float | None
    job_id: int | None


@dataclass(frozen=True, slots=True)
class Retention:
    """How long samples, and the means of minutes, are kept."""

    raw_hours: float = 24
    minutes_days: float = 30


class Recorder:
    """Stores what the sampler's rings hold, as long as this process is the one of its host that does.

    It starts the sampler when it is elected, so that a process that only stands by reads no GPU. A store that
    cannot be written never stops the sampling: `problem` says why, and what the rings hold is stored later.
    """

    def __init__(
        self,
        sampler: Sampler,
        data_dir: DataDir,
        jobs_by_uuid: Callable[[], Mapping[str, int]] = dict,
        *,
        host: str | None = None,
        retention: Retention = Retention(),
        every_s: float = 5.0,
    ) -> None:
        self.problem: str | None = None
        self._sampler = sampler
        self._path = data_dir.gpu_db
        self._lock = _Lock(data_dir.locks / "gpu-sampler.lock")
        self._jobs_by_uuid = jobs_by_uuid
        self._host = host or socket.gethostname()
        self._retention = retention
        self._every_s = every_s
        self._db: sqlite3.Connection | None = None
        self._stored: dict[int, float] = {}
        self._cleaned = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-history", daemon=True)

    @property
    def elected(self) -> bool:
        """Whether this process is the one that stores."""
        return self._lock.held

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 0.5) -> bool:
        """Stores the rest and lets another process take over; False where the disk does not answer in time."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._turn()
            self._stop.wait(self._every_s)
        if self.elected:
            self._turn()
        self._close()
        self._lock.release()

    def _turn(self) -> None:
        try:
            if self._lock.acquire():
                self._sampler.start()
                self._write(time.time())
            self.problem = None
        except UserError as error:
            self._close()
            self.problem = str(error)

    def _write(self, now: float) -> None:
        if self._db is None:
            self._db = open_writer(self._path, "gpu")
            self._stored = {}
        jobs = self._jobs_by_uuid()
        with explained(self._path), transaction(self._db) as db:
            for sample in self._sampler.latest():
                rows = self._rows(db, sample.index, now)
                identity = (sample.uuid, sample.memory_total_bytes, jobs.get(sample.uuid))
                self._insert(db, sample.index, rows, identity)
            if now - self._cleaned >= MINUTE_S:
                self._clean(db, now)
                self._cleaned = now

    def _rows(self, db: sqlite3.Connection, index: int, now: float) -> list[Reading]:
        """What the ring holds that is not stored yet, by this process or by the one that did it before."""
        if index not in self._stored:
            newest = "SELECT max(timestamp) FROM gpu_metrics WHERE host = ? AND gpu_index = ?"
            self._stored[index] = db.execute(newest, (self._host, index)).fetchone()[0] or 0.0
        # A clock that was set back must not silence the history until it has caught up.
        self._stored[index] = min(self._stored[index], now)
        return self._sampler.ring(index).after(self._stored[index])

    def _insert(self, db: sqlite3.Connection, index: int, rows: list[Reading], identity: tuple[object, ...]) -> None:
        uuid, total, job_id = identity
        known = [row for row in rows if any(value is not None for value in row[1:])]
        if not known:
            return
        db.executemany(
            "INSERT OR IGNORE INTO gpu_metrics VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(self._host, index, row.timestamp, uuid, row.utilization, row.memory_used_bytes, total,
              row.temperature_c, row.power_w, job_id) for row in known],
        )  # fmt: skip
        db.execute(ROLL_UP, (self._host, index, _minute_of(known[0].timestamp)))
        self._stored[index] = known[-1].timestamp

    def _clean(self, db: sqlite3.Connection, now: float) -> None:
        """Deletes by range of the primary key, card by card: without it each pass would read the whole table.

        Whole minutes only, so that the means of minutes go on exactly where the samples end.
        """
        raw = _minute_of(now - self._retention.raw_hours * 3600)
        minutes = int(now - self._retention.minutes_days * 86400) // MINUTE_S
        for index in _gpus(db, self._host):
            which = (self._host, index)
            db.execute("DELETE FROM gpu_metrics WHERE host = ? AND gpu_index = ? AND timestamp < ?", (*which, raw))
            db.execute("DELETE FROM gpu_minutes WHERE host = ? AND gpu_index = ? AND minute < ?", (*which, minutes))

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def recent(path: Path, host: str, seconds: float, interval_s: float = 1.0) -> dict[int, list[Reading]]:
    """The last samples of each card up to now, to fill the rings at start; times without any are empty readings."""
    if not path.exists():
        return {}
    now = time.time()
    with explained(path), closing(open_reader(path, "gpu")) as db:
        rows = {index: db.execute(RAW, (host, index, now - seconds)).fetchall() for index in _gpus(db, host)}
    return {
        index: _with_gaps([Reading(*(row[name] for name in Reading._fields)) for row in found], now, interval_s)
        for index, found in rows.items()
        if found
    }


def since(path: Path, host: str, seconds: float, gpu_index: int | None = None) -> list[StoredSample]:
    """The history of one card or of all, card by card, oldest first; means of minutes where samples are gone."""
    start = time.time() - seconds
    found: list[StoredSample] = []
    with explained(path), closing(open_reader(path, "gpu")) as db:
        for index in _gpus(db, host) if gpu_index is None else [gpu_index]:
            raw = db.execute(RAW, (host, index, start)).fetchall()
            first_raw = raw[0]["timestamp"] if raw else time.time() + MINUTE_S
            bounds = (-(-start // MINUTE_S), first_raw // MINUTE_S)
            minutes = db.execute(MINUTES, (host, index, *bounds)).fetchall()
            found += [StoredSample(**dict(row)) for row in (*minutes, *raw)]
    return found


def last_busy(path: Path, host: str, index: int, after: float, above: int = 5) -> float | None:
    """When the utilisation of a card was last above some percent, or `after` where it was not since then.

    None where nothing is known: no history of that time, or of the last minutes.
    """
    if not path.exists():
        return None
    first = after // MINUTE_S + 1
    with explained(path), closing(open_reader(path, "gpu")) as db:
        newest, busiest = db.execute(LAST_BUSY, {"host": host, "gpu": index, "first": first, "above": above}).fetchone()
    if newest is None or time.time() - newest * MINUTE_S > 3 * MINUTE_S:
        return None
    return after if busiest is None else (busiest + 1) * MINUTE_S


class _Lock:
    """An exclusive lock on a file, which the kernel gives back when its holder dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def acquire(self) -> bool:
        """Takes the lock, or keeps it; False where another process has it."""
        if self._file is not None:
            return True
        private_folder(self._path.parent)
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with suppress(PermissionError):  # another user's, which is as it should be already
                os.fchmod(file, file_mode(self._path.parent))
        except OSError as error:
            raise UserError(f"the lock {self._path} cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if isinstance(error, BlockingIOError):
                return False
            raise UserError(f"the lock {self._path} cannot be taken: {error.strerror}") from None
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _gpus(db: sqlite3.Connection, host: str) -> Iterator[int]:
    """The cards of a host, hopping along the primary key of the smaller table instead of reading it."""
    query = "SELECT min(gpu_index) FROM gpu_minutes WHERE host = ? AND gpu_index > ?"
    index = -1
    while (index := db.execute(query, (host, index)).fetchone()[0]) is not None:
        yield index


def _minute_of(timestamp: float) -> float:
    return timestamp // MINUTE_S * MINUTE_S


def _with_gaps(rows: list[Reading], now: float, interval_s: float) -> list[Reading]:
    """One reading per interval up to now, so that a time in which nothing was recorded takes its room."""
    filled: list[Reading] = []
    for row, following in zip(rows, [*rows[1:], Reading(now)], strict=True):
        filled.append(row)
        missing = round((following.timestamp - row.timestamp) / interval_s) - 1
        filled += [Reading(row.timestamp + n * interval_s) for n in range(1, missing + 1)]
    return filled
