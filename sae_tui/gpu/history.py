"""Writes `gpu.db`, a host's GPU history. A file lock ensures that only one process per host writes at a time."""

from __future__ import annotations

import contextlib
import math
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from sae_tui.gpu.base import GpuSample, is_identified
from sae_tui.gpu.ring import RingReading
from sae_tui.gpu.sampler import Sampler
from sae_tui.gpu.stored import MINUTE_S, indices
from sae_tui.gpu.upkeep import Retention, Upkeep
from trainer.contract.errors import UserError
from trainer.contract.locks import FileLock
from trainer.contract.paths import DataDir
from trainer.contract.store.database import explain_errors, open_reader, open_writer, transaction
from trainer.contract.store.follower import StoreFile

# A write to the store that takes longer than this is reported as hung. A write normally takes less than a second, plus
# up to 5 s spent waiting for another writer.
SILENT_AFTER_S = 30.0
# Each minute's row is computed from stored readings so that it is correct even if two processes write it.
ROLL_UP = (
    "INSERT OR REPLACE INTO gpu_minutes SELECT host, gpu_index, CAST(timestamp / 60 AS INTEGER) AS minute,"
    " max(gpu_uuid), count(*), avg(utilization), max(utilization), CAST(avg(memory_used) AS INTEGER),"
    " max(memory_total), CAST(round(avg(temperature)) AS INTEGER), avg(power_draw), max(job_id)"
    " FROM gpu_metrics WHERE host = ? AND gpu_index = ? AND timestamp >= ? AND gpu_uuid = ?"
    " GROUP BY host, gpu_index, minute"
)
STORED = (
    "SELECT timestamp FROM gpu_metrics WHERE host = ? AND gpu_index = ? AND timestamp BETWEEN ? AND ? AND gpu_uuid = ?"
)

HAS_OTHERS = "SELECT EXISTS(SELECT 1 FROM gpu_minutes WHERE host < ?1 OR host > ?1)"


class Recorder:
    """Stores the samples from the sampler's rings, if this process is its host's elected writer.

    The recorder starts the sampler only once its process is elected; standby processes do not read the GPUs.
    If the store cannot be written to, `problem` explains why, sampling continues, and the rings are stored later.
    """

    def __init__(
        self,
        sampler: Sampler,
        data_dir: DataDir,
        jobs_by_uuid: Callable[[], Mapping[str, int]] = dict,
        *,
        host: str | None = None,
        retention: Retention | None = None,
        every_s: float = 5.0,
    ) -> None:
        self._problem: str | None = None
        # The monotonic time at which the current turn started, or None between turns.
        self._begun: float | None = None
        self._sampler = sampler
        self._path = data_dir.gpu_db
        self._own_path = data_dir.own_gpu_db
        self._lock = FileLock(data_dir.locks / f"gpu-sampler-{data_dir.host_word}.lock")
        self._jobs_by_uuid = jobs_by_uuid
        self._host = host or socket.gethostname()
        self._every_s = every_s
        self._use(self._path, retention or Retention())
        # Maps each GPU's index and UUID to the ring position after its last stored reading.
        self._stored: dict[tuple[int, str], int] = {}
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._paused = self._is_at_rest = False
        self._thread = threading.Thread(target=self._run, name="gpu-history", daemon=True)

    @property
    def problem(self) -> str | None:
        """Why nothing can be stored, for example because a disk does not respond, or None if there is no problem."""
        begun = self._begun
        if begun is not None and (silent_s := time.monotonic() - begun) > SILENT_AFTER_S:
            return f"the GPU history has not been stored for {silent_s:.0f} s: {self._path} does not respond"
        return self._problem

    @property
    def elected(self) -> bool:
        """True if this process is its host's elected writer."""
        return self._lock.held

    def _use(self, path: Path, retention: Retention) -> None:
        self._path = path
        self._upkeep = Upkeep(path, self._host, retention)
        self._file = StoreFile(path, self._open)

    def retain(self, retention: Retention) -> None:
        """Change how long samples are kept."""
        self._upkeep.retention = retention

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 0.5) -> bool:
        """Store the remaining samples and let another process take over; return False on a timeout."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def pause(self, timeout: float) -> bool:
        """Store the remaining samples and let another process take over until `resume`; return False on a timeout."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._is_at_rest or not self._thread.is_alive(), timeout)

    def resume(self) -> None:
        """Resume trying to become this host's elected writer."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._turn()
            with self._changed:
                self._changed.wait_for(lambda: self._stop.is_set() or self._paused, self._every_s)
            if self._paused:
                self._hand_over()
                self._rest()
        self._hand_over()

    def _hand_over(self) -> None:
        if self.elected:
            self._turn()
        self._file.close()
        self._lock.release()

    def _rest(self) -> None:
        with self._changed:
            self._is_at_rest = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stop.is_set() or not self._paused)
            self._is_at_rest = False

    def _turn(self) -> None:
        self._begun = time.monotonic()
        try:
            if self._lock.acquire():
                self._leave_file_of_others()
                self._sampler.start()
                self._write(time.time())
            self._problem = None
        except UserError as error:
            self._give_up(str(error))
        except Exception as error:
            # Store, disk and GPU errors must not end this thread.
            self._give_up(f"the GPU history cannot be stored: {error!r}")
        finally:
            self._begun = None

    def _give_up(self, problem: str) -> None:
        """Close the store after a problem; the next turn reopens it."""
        self._problem = problem
        with contextlib.suppress(Exception):
            self._file.close()

    def _write(self, now: float) -> None:
        db = self._file.connection()
        jobs = self._jobs_by_uuid()
        with explain_errors(self._path):
            with transaction(db):
                # Keep the readings in the ring until the GPU's UUID is known.
                for sample in filter(is_identified, self._sampler.latest()):
                    rows = self._rows(db, sample)
                    self._insert(db, sample, rows, jobs.get(sample.uuid))
            if not self._stop.is_set():
                self._upkeep.turn(db, now)

    def _rows(self, db: sqlite3.Connection, sample: GpuSample) -> list[RingReading]:
        """Return the readings in a GPU's ring that no process has stored yet."""
        key = sample.index, sample.uuid
        rows, position = self._sampler.ring(sample.index).since(self._stored.get(key), sample.uuid)
        if rows and key not in self._stored:
            rows = self._unstored(db, sample.uuid, rows)
        self._stored[key] = position
        return rows

    def _unstored(self, db: sqlite3.Connection, uuid: str, rows: list[RingReading]) -> list[RingReading]:
        """Return the readings in `rows` after the last stored one.

        If none of `rows` is stored, return those later than all stored readings.
        """
        times = [row.timestamp for row in rows]
        # The GPU may previously have had a different index, so search all GPU indices on this host.
        asked = [(self._host, index, min(times), max(times), uuid) for index in indices(db, self._host)]
        stored = {timestamp for each in asked for (timestamp,) in db.execute(STORED, each)}
        known = [place for place, time_ in enumerate(times) if time_ in stored]
        if known:
            return rows[known[-1] + 1 :]
        newest = max(stored, default=-math.inf)
        return [row for row in rows if row.timestamp > newest]

    def _insert(self, db: sqlite3.Connection, sample: GpuSample, rows: list[RingReading], job_id: int | None) -> None:
        measured = [row for row in rows if any(value is not None for value in row[1:])]
        if not measured:
            return
        db.executemany(
            "INSERT OR IGNORE INTO gpu_metrics VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(self._host, sample.index, row.timestamp, sample.uuid, row.utilization, row.memory_used_bytes,
              sample.memory_total_bytes, row.temperature_c, row.power_w, job_id, row.energy_j) for row in measured],
        )  # fmt: skip
        # If the clock was set back, the readings are not in chronological order.
        begin = min(row.timestamp for row in measured) // MINUTE_S * MINUTE_S
        db.execute(ROLL_UP, (self._host, sample.index, begin, sample.uuid))

    def _open(self) -> sqlite3.Connection:
        """Open the store, and make the next turn determine again which readings the store contains."""
        self._stored = {}
        return open_writer(self._path, "gpu")

    def _leave_file_of_others(self) -> None:
        """Switch to a separate file for this host if the shared file from earlier versions contains other hosts' rows.

        Hosts that write to the same file block each other, and corrupt it if locks do not work across hosts.
        """
        if self._path == self._own_path:
            return
        if self._own_path.exists():
            # Another process on this host has switched to the separate file since this process started.
            self._file.close()
            self._use(self._own_path, self._upkeep.retention)
        elif self._path.exists():
            with explain_errors(self._path), closing(open_reader(self._path, "gpu")) as db:
                has_others = db.execute(HAS_OTHERS, (self._host,)).fetchone()[0]
            if has_others:
                self._copy_own_rows()
                self._file.close()
                self._use(self._own_path, self._upkeep.retention)

    def _copy_own_rows(self) -> None:
        for path in (self._path, self._own_path):
            open_writer(path, "gpu").close()
        with explain_errors(self._own_path), closing(sqlite3.connect(self._own_path, isolation_level=None)) as db:
            db.execute("ATTACH ? AS shared", (str(self._path),))
            with transaction(db):
                for table in ("gpu_metrics", "gpu_minutes"):
                    db.execute(
                        f"INSERT OR IGNORE INTO {table} SELECT * FROM shared.{table} WHERE host = ?", (self._host,)
                    )
