"""Writes `gpu.db`, the history of a host's GPUs; only one process per host does it, the one that holds a file lock."""

from __future__ import annotations

import math
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping

from sae_tui.gpu.base import GpuSample, is_identified
from sae_tui.gpu.ring import Reading
from sae_tui.gpu.sampler import Sampler
from sae_tui.gpu.stored import MINUTE_S, NEVER, indices
from sae_tui.gpu.upkeep import Retention, Upkeep
from trainer.contract.errors import UserError
from trainer.contract.locks import FileLock
from trainer.contract.paths import DataDir
from trainer.contract.store.database import explain_errors, open_writer, transaction
from trainer.contract.store.follower import StoreFile

# A turn takes less than a second, and waits up to 5 s for another writer.
SILENT_AFTER_S = 30.0
# Computed from the stored rows, so that a minute that two processes shared, or that is written twice, counts once.
ROLL_UP = (
    "INSERT OR REPLACE INTO gpu_minutes SELECT host, gpu_index, CAST(timestamp / 60 AS INTEGER) AS minute,"
    " max(gpu_uuid), count(*), avg(utilization), max(utilization), CAST(avg(memory_used) AS INTEGER),"
    " max(memory_total), CAST(round(avg(temperature)) AS INTEGER), avg(power_draw), max(job_id)"
    " FROM gpu_metrics WHERE host = ? AND gpu_index = ? AND timestamp >= ? AND gpu_uuid = ?"
    " GROUP BY host, gpu_index, minute"
)
NEWEST = (
    "SELECT max(timestamp) FROM gpu_metrics WHERE host = ? AND gpu_index = ?"
    f" AND timestamp BETWEEN ? AND {NEVER} AND gpu_uuid = ?"
)


class Recorder:
    """Stores the samples in the sampler's rings, if this process is the one of its host that does so.

    It starts the sampler when it is elected, so that a process that only stands by reads no GPU. A store that
    cannot be written never stops the sampling: `problem` says why, and the rings are stored later.
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
        # When the turn that is under way began.
        self._begun: float | None = None
        self._sampler = sampler
        self._path = data_dir.gpu_db
        self._lock = FileLock(data_dir.locks / "gpu-sampler.lock")
        self._jobs_by_uuid = jobs_by_uuid
        self._host = host or socket.gethostname()
        self._upkeep = Upkeep(self._path, self._host, retention or Retention())
        self._every_s = every_s
        self._file = StoreFile(self._path, self._open)
        self._stored: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-history", daemon=True)

    @property
    def problem(self) -> str | None:
        """Why nothing can be stored, or for how long the disk has not answered; None while all is well."""
        begun = self._begun
        if begun is not None and (silent_s := time.monotonic() - begun) > SILENT_AFTER_S:
            return f"the history of GPUs has not been stored for {silent_s:.0f} s: {self._path} does not answer"
        return self._problem

    @property
    def elected(self) -> bool:
        """Whether this process is the one that stores."""
        return self._lock.held

    def retain(self, retention: Retention) -> None:
        """Keep samples for another time from now on."""
        self._upkeep.retention = retention

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 0.5) -> bool:
        """Store the rest and let another process take over; return False if the disk does not answer in time."""
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
        self._file.close()
        self._lock.release()

    def _turn(self) -> None:
        self._begun = time.monotonic()
        try:
            if self._lock.acquire():
                self._sampler.start()
                self._write(time.time())
            self._problem = None
        except Exception as error:
            # This thread must outlive whatever the store, the disk or a GPU does.
            self._file.close()
            known = isinstance(error, UserError)
            self._problem = str(error) if known else f"the history of GPUs cannot be stored: {error!r}"
        finally:
            self._begun = None

    def _write(self, now: float) -> None:
        db = self._file.connection()
        jobs = self._jobs_by_uuid()
        with explain_errors(self._path):
            with transaction(db):
                # Readings wait in the ring until the card's UUID is known.
                for sample in filter(is_identified, self._sampler.latest()):
                    rows = self._rows(db, sample, now)
                    self._insert(db, sample, rows, jobs.get(sample.uuid))
            if not self._stop.is_set():
                self._upkeep.turn(db, now)

    def _rows(self, db: sqlite3.Connection, sample: GpuSample, now: float) -> list[Reading]:
        """Return the readings in the ring that are not stored yet, by this process or by an earlier one."""
        ring = self._sampler.ring(sample.index)
        held = ring.after(0.0)
        if sample.uuid not in self._stored:
            if not held:
                return []
            # Readings before the oldest one in the ring can from now on only come from the store.
            oldest = math.nextafter(held[0].timestamp, 0.0)
            self._stored[sample.uuid] = max(oldest, self._newest(db, sample.uuid, oldest))
        # A clock that was set back must not silence the history until it has caught up.
        self._stored[sample.uuid] = min(self._stored[sample.uuid], now)
        return [row for row in held if row.timestamp > self._stored[sample.uuid]]

    def _newest(self, db: sqlite3.Connection, uuid: str, oldest: float) -> float:
        """Return the time up to which a card is stored, after `oldest`, at whichever index it was; 0.0 if it is not."""
        asked = [(self._host, index, oldest, uuid) for index in indices(db, self._host)]
        return max((db.execute(NEWEST, each).fetchone()[0] or 0.0 for each in asked), default=0.0)

    def _insert(self, db: sqlite3.Connection, sample: GpuSample, rows: list[Reading], job_id: int | None) -> None:
        measured = [row for row in rows if any(value is not None for value in row[1:])]
        if not measured:
            return
        db.executemany(
            "INSERT OR IGNORE INTO gpu_metrics VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(self._host, sample.index, row.timestamp, sample.uuid, row.utilization, row.memory_used_bytes,
              sample.memory_total_bytes, row.temperature_c, row.power_w, job_id, row.energy_j) for row in measured],
        )  # fmt: skip
        begin = measured[0].timestamp // MINUTE_S * MINUTE_S
        db.execute(ROLL_UP, (self._host, sample.index, begin, sample.uuid))
        self._stored[sample.uuid] = measured[-1].timestamp

    def _open(self) -> sqlite3.Connection:
        """Open the store; what of the rings is stored there is to be looked up again."""
        self._stored = {}
        return open_writer(self._path, "gpu")
