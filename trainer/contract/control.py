"""`control.db`: jobs, ranks, leases, requests and events of one data folder.

Every change of a job's state is one `BEGIN IMMEDIATE` transaction that checks the move is legal, so
that two processes cannot both make it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from trainer.contract.problems import UserError
from trainer.contract.process import ProcessRef
from trainer.contract.states import ACTIVE, TRANSITIONS, JobState
from trainer.contract.store import data_version, explained, open_reader, open_writer, transaction

RequestKind = Literal["stop", "kill"]
_LIST_COLUMNS = ("gpu_ids", "gpu_uuids")  # columns that hold a JSON list


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `jobs`. Times are seconds since the epoch; `device` is "cuda" or "cpu"."""

    id: int = 0
    name: str
    state: JobState = JobState.QUEUED
    config: str
    user: str
    host: str
    device: str
    gpu_source: str
    gpu_ids: tuple[int, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    distributed: bool = False
    world_size: int = 1
    mode: str = "single"
    boot_id: str | None = None
    supervisor_pid: int | None = None
    supervisor_start: int | None = None
    attempt: int = 0
    parent: int | None = None
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    step: int = 0
    total_steps: int | None = None
    tokens: int = 0
    loss: float | None = None
    fvu: float | None = None
    l0: float | None = None
    dead_fraction: float | None = None
    tokens_per_s: float | None = None
    error: str | None = None
    output_path: str | None = None
    d_in: int | None = None
    d_out: int | None = None
    # Per rank; the peak is what PyTorch reserved on the fullest GPU, or what the fullest process held on the CPU.
    estimated_memory_bytes: int | None = None
    peak_memory_bytes: int | None = None

    @property
    def supervisor(self) -> ProcessRef | None:
        if self.supervisor_pid is None or self.supervisor_start is None or self.boot_id is None:
            return None
        return ProcessRef(self.supervisor_pid, self.supervisor_start, self.boot_id)


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `ranks`: one training process and how it ended."""

    job_id: int
    attempt: int
    rank: int
    pid: int
    start_ticks: int
    boot_id: str
    exit_code: int | None = None
    exit_signal: int | None = None
    ended: float | None = None
    error: str | None = None

    @property
    def process(self) -> ProcessRef:
        return ProcessRef(self.pid, self.start_ticks, self.boot_id)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `leases`: who holds which GPU since when."""

    host: str
    gpu_uuid: str
    gpu_index: int
    job_id: int
    user: str
    pid: int
    since: float


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a job; level is "info", "warning" or "error"."""

    timestamp: float
    level: str
    kind: str
    message: str


class LeaseConflict(UserError):
    """A GPU that somebody else holds."""


class Control:
    """The control store of a data folder; opened read-only it creates and changes nothing."""

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        self.path = path
        self._db = open_reader(path, "control") if readonly else open_writer(path, "control")

    def close(self) -> None:
        self._db.close()

    def version(self) -> int:
        """Changes when another process has written."""
        with explained(self.path):
            return data_version(self._db)

    # jobs

    def create_job(self, job: Job) -> int:
        """Records a queued job and returns its id."""
        row = msgspec.structs.asdict(job) | {"created": job.created or time.time()}
        del row["id"]
        row |= {name: _list_to_text(row[name]) for name in _LIST_COLUMNS}
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        with self._write() as db:
            return int(db.execute(f"INSERT INTO jobs({names}) VALUES({marks})", tuple(row.values())).lastrowid or 0)

    def job(self, job_id: int) -> Job:
        """The job of this id; raises `UserError` where there is none."""
        found = self._select(f"SELECT * FROM jobs WHERE id = {int(job_id)}")
        if not found:
            raise UserError(f"there is no job {job_id}; `sae-tui jobs` lists them")
        return _job(found[0])

    def jobs(self, states: Iterable[JobState] | None = None) -> list[Job]:
        """All jobs, or those in the given states, newest first."""
        if states is None:
            return [_job(row) for row in self._select("SELECT * FROM jobs ORDER BY id DESC")]
        wanted = ", ".join(f"'{JobState(state)}'" for state in states)
        return [_job(row) for row in self._select(f"SELECT * FROM jobs WHERE state IN ({wanted}) ORDER BY id DESC")]

    def active_jobs(self) -> list[Job]:
        return self.jobs(ACTIVE)

    def transition(self, job_id: int, to: JobState, **fields: Any) -> bool:
        """Moves a job to a state and sets fields in one step; False where that move is not legal now."""
        with self._write() as db:
            return self._move(db, job_id, to, fields)

    def _move(self, db: sqlite3.Connection, job_id: int, to: JobState, fields: dict[str, Any]) -> bool:
        row = db.execute("SELECT state FROM jobs WHERE id = ?", (job_id,)).fetchone()
        if row is None or to not in TRANSITIONS[JobState(row["state"])]:
            return False
        fields = {**fields, "state": str(to)}
        if to.is_final:
            fields.setdefault("ended", time.time())
            db.execute("DELETE FROM leases WHERE job_id = ?", (job_id,))
        _update(db, job_id, fields)
        return True

    def update(self, job_id: int, **fields: Any) -> None:
        """Sets fields of a job that are not its state, which only `transition` may change."""
        assert "state" not in fields
        with self._write() as db:
            _update(db, job_id, fields)

    # leases

    def lease(self, job: Job, gpus: Sequence[tuple[int, str]], **fields: Any) -> bool:
        """Takes (index, uuid) GPUs and moves the job to `starting`, all in one step.

        Raises `LeaseConflict` where another job holds one; False where the job may no longer start.
        """
        with self._write() as db:
            for index, uuid in gpus:
                held = db.execute(
                    "SELECT job_id, user FROM leases WHERE host = ? AND gpu_uuid = ?", (job.host, uuid)
                ).fetchone()
                if held and held["job_id"] != job.id:
                    raise LeaseConflict(f"GPU {index} is held by job {held['job_id']} ({held['user']})")
            if not self._move(db, job.id, JobState.STARTING, fields):
                return False
            rows = [(job.host, uuid, index, job.id, job.user, os.getpid(), time.time()) for index, uuid in gpus]
            db.executemany("INSERT OR REPLACE INTO leases VALUES(?, ?, ?, ?, ?, ?, ?)", rows)
            return True

    def leases(self) -> list[Lease]:
        return [Lease(**row) for row in self._select("SELECT * FROM leases ORDER BY host, gpu_index")]

    # ranks

    def record_rank(self, rank: Rank) -> None:
        """Writes how a rank was started, or how it ended."""
        row = msgspec.structs.asdict(rank)
        marks = ", ".join("?" * len(row))
        with self._write() as db:
            db.execute(f"INSERT OR REPLACE INTO ranks({', '.join(row)}) VALUES({marks})", tuple(row.values()))

    def ranks(self, job_id: int) -> list[Rank]:
        rows = self._select(f"SELECT * FROM ranks WHERE job_id = {int(job_id)} ORDER BY attempt, rank")
        return [Rank(**row) for row in rows]

    # requests

    def request(self, job_id: int, kind: RequestKind) -> None:
        """Asks a job for something; its supervisor and its rank 0 look every half second."""
        with self._write() as db:
            db.execute("INSERT INTO requests(job_id, kind, created) VALUES(?, ?, ?)", (job_id, kind, time.time()))

    def requested(self, job_id: int) -> set[RequestKind]:
        """What has been asked of a job so far."""
        return {row["kind"] for row in self._select(f"SELECT kind FROM requests WHERE job_id = {int(job_id)}")}

    # events

    def add_event(self, job_id: int, kind: str, message: str, level: str = "info") -> None:
        with self._write() as db:
            db.execute(
                "INSERT INTO events(job_id, timestamp, level, kind, message) VALUES(?, ?, ?, ?, ?)",
                (job_id, time.time(), level, kind, message),
            )

    def events(self, job_id: int) -> list[Event]:
        """What happened to a job, oldest first."""
        rows = self._select(
            f"SELECT timestamp, level, kind, message FROM events WHERE job_id = {int(job_id)} ORDER BY id"
        )
        return [Event(**row) for row in rows]

    def _select(self, query: str) -> list[dict[str, Any]]:
        with explained(self.path):
            return [dict(row) for row in self._db.execute(query)]

    @contextlib.contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with explained(self.path), transaction(self._db) as db:
            yield db


def _update(db: sqlite3.Connection, job_id: int, fields: dict[str, Any]) -> None:
    unknown = fields.keys() - set(Job.__struct_fields__)
    assert not unknown, unknown
    values = {name: _list_to_text(fields[name]) if name in _LIST_COLUMNS else fields[name] for name in fields}
    db.execute(
        f"UPDATE jobs SET {', '.join(f'{name} = ?' for name in values)} WHERE id = ?", (*values.values(), job_id)
    )


def _job(row: dict[str, Any]) -> Job:
    return msgspec.convert(
        row
        | {
            "gpu_ids": msgspec.json.decode(row["gpu_ids"]),
            "gpu_uuids": msgspec.json.decode(row["gpu_uuids"]),
            "distributed": bool(row["distributed"]),
        },
        Job,
    )


def _list_to_text(values: Iterable[Any]) -> str:
    return msgspec.json.encode(list(values)).decode()
