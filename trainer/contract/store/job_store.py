"""The store `control.db`: the jobs, ranks, leases, requests and events in one data folder.

A job's state is changed in a `BEGIN IMMEDIATE` transaction that checks whether the transition is allowed, so two
processes cannot both make the same transition.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.store.database import (
    explain_errors,
    open_reader,
    open_writer,
    savepoint,
    transaction,
)
from trainer.contract.store.follower import StoreFile
from trainer.contract.store.rows import (
    LARGEST_ID,
    Event,
    GpuUse,
    Job,
    Lease,
    Rank,
    as_columns,
    readable,
    salvage,
    to_job,
    to_row,
)
from trainer.contract.store.states import ACTIVE, DONE, TRANSITIONS, JobState
from trainer.contract.wording import plural

# The process evaluating the job's SAEs handles the request "stop-evaluation"; the supervisor handles all other
# requests.
RequestKind = Literal["stop", "kill", "pause", "finish", "stop-evaluation"]
# Requests to end a job's current run.
ENDING: frozenset[RequestKind] = frozenset({"stop", "kill", "pause"})
# The maximum number of unreadable rows to list by id in one message.
MOST_NAMED = 5
_REQUESTS = get_args(RequestKind)
_STATES = frozenset(map(str, JobState))


class LeaseConflict(UserError):
    """An error for a GPU already held by another job."""


class Unreadable(UserError):
    """An error for corrupt rows, which contain values that this program never writes."""

    def __init__(self, job_ids: Iterable[int]) -> None:
        ids = sorted(job_ids, reverse=True)
        which = ", ".join(map(str, ids[:MOST_NAMED])) + (" ..." if len(ids) > MOST_NAMED else "")
        rows, again = (f"jobs {which}", "them") if len(ids) > 1 else (f"job {which}", "it")
        super().__init__(f"the list of jobs has no readable row for {rows}; `sae-tui repair` rebuilds {again}")


class Control:
    """The job store in a data folder; a store opened read-only is never created or changed.

    Unreadable rows are skipped, so that the other rows stay usable. `unreadable` contains the ids skipped by the last
    call to `jobs`. `mend` repairs an unreadable row.
    """

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        self.path = path
        open_store = open_reader if readonly else open_writer
        self._file = StoreFile(path, lambda: open_store(path, "control"))
        self._file.connection()
        self.unreadable: frozenset[int] = frozenset()
        self._together: sqlite3.Connection | None = None

    def close(self) -> None:
        self._file.close()

    def version(self) -> tuple[int, int]:
        """Return a value that changes when another process writes to the store or replaces its file."""
        return self._file.version()

    @property
    def _db(self) -> sqlite3.Connection:
        return self._together or self._file.connection()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Make all changes in the body one transaction; a change that fails in the body is undone on its own.

        Other processes cannot write in the meantime, so the body must take less than `BUSY_TIMEOUT_S`.
        """
        outer = self._together
        with self._write() as db:
            self._together = db
            try:
                yield
            finally:
                self._together = outer

    # jobs

    def create_job(self, job: Job, *, above: int = 0, prepare: Callable[[Job], Job] | None = None) -> int:
        """Insert a job and return its new id, an unused id larger than `above`.

        `prepare` creates the job's files and returns the complete row. If `prepare` raises an error, no job is
        inserted.
        """
        created = job.created or time.time()
        with self._write() as db:
            number = _free_number(db, above)
            row = msgspec.structs.replace(job, id=number, created=created, queued=job.queued or created)
            # Insert first, so that a full disk is noticed before any files are created.
            _insert(db, to_row(row))
            if prepare:
                _update(db, number, msgspec.structs.asdict(prepare(row)))
            return number

    def restore(self, job: Job, events: Iterable[Event] = (), ranks: Iterable[Rank] = ()) -> bool:
        """Reinsert a lost job with its leases, events and ranks; return False if a job with its id exists."""
        with self._write() as db:
            if db.execute("SELECT 1 FROM jobs WHERE id = ?", (job.id,)).fetchone():
                return False
            _put(db, job)
            for event in events:
                db.execute(_ADD_EVENT, (job.id, *msgspec.structs.astuple(event)))
        for rank in ranks:
            self.record_rank(rank)
        return True

    def copy(
        self, job: Job, ranks: Iterable[Rank], requests: Iterable[RequestKind], events: Iterable[Event] = ()
    ) -> None:
        """Store a job's row from another store, without leases, in place of any earlier copy; append the events."""
        with self.together(), self._write() as db:
            db.execute("DELETE FROM jobs WHERE id = ?", (job.id,))
            for table in ("ranks", "requests"):
                db.execute(f"DELETE FROM {table} WHERE job_id = ?", (job.id,))
            _insert(db, to_row(job))
            db.executemany(_ADD_EVENT, [(job.id, *msgspec.structs.astuple(event)) for event in events])
            for rank in ranks:
                self.record_rank(rank)
            for kind in requests:
                self.request(job.id, kind)

    def mend(self, job_id: int, fallback: Job, *, above: int = 0) -> Job:
        """Rewrite an unreadable row, taking unreadable columns from `fallback`; return the job.

        A job with an invalid id gets the next free id above `above`.
        """
        with self._write() as db:
            rows = _dicts(db, f"SELECT * FROM jobs WHERE id = {int(job_id)}")
            job = salvage(rows[0], fallback) if rows else fallback
            db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
            if not 0 < job_id <= LARGEST_ID:
                job = msgspec.structs.replace(job, id=_free_number(db, above))
            db.execute("DELETE FROM leases WHERE job_id = ?", (job.id,))
            _put(db, job)
        return job

    def forget(self, job_id: int) -> bool:
        """Delete an ended job and its other rows from the store; return False if the job is still active.

        If the job had finished, the jobs that depend on it no longer wait for it. Otherwise, these jobs continue to
        wait.
        """
        with self._write() as db:
            state = _state(db, job_id)
            if state in ACTIVE:
                return False
            if state in DONE:
                db.execute(_WITHOUT, (job_id, job_id))
            db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
            for table in ("ranks", "leases", "requests", "events"):
                db.execute(f"DELETE FROM {table} WHERE job_id = ?", (job_id,))
            return True

    def job(self, job_id: int) -> Job:
        """Return the job with this id; raise `UserError` if it does not exist, `Unreadable` if its row is corrupt."""
        rows = self._select(f"SELECT * FROM jobs WHERE id = {int(job_id)}")
        if not rows:
            raise UserError(f"there is no job {job_id}; `sae-tui jobs` lists them")
        try:
            return to_job(rows[0])
        except ValueError:
            raise Unreadable([job_id]) from None

    def jobs(self, states: Iterable[JobState] | None = None) -> list[Job]:
        """Return all jobs, or only jobs in the given states, latest first; list skipped rows in `unreadable`."""
        wanted = "" if states is None else ", ".join(f"'{JobState(state)}'" for state in states)
        where = "" if states is None else f"WHERE state IN ({wanted})"
        jobs: list[Job] = []
        unreadable: set[int] = set()
        for row in self._select(f"SELECT * FROM jobs {where} ORDER BY id DESC"):
            try:
                jobs.append(to_job(row))
            except ValueError:
                unreadable.add(row["id"])
        self.unreadable = frozenset(unreadable)
        return jobs

    @property
    def problem(self) -> str:
        """A sentence about the skipped jobs, or "" if all rows were readable."""
        return str(Unreadable(self.unreadable)) if self.unreadable else ""

    def state(self, job_id: int) -> JobState | None:
        """Return the state of a job, or None if there is no such job; raise `Unreadable` if its state is invalid."""
        with explain_errors(self.path):
            return _state(self._db, job_id)

    def active_jobs(self) -> list[Job]:
        return self.jobs(ACTIVE)

    def gpu_use(self, host: str, since: float) -> list[GpuUse]:
        """Return the GPU use of the jobs on a host that have started and had not ended by the time `since`."""
        with explain_errors(self.path):
            return list(readable(_dicts(self._db, _GPU_USE, (host, since)), GpuUse))

    def transition(self, job_id: int, to: JobState, *, unless: Iterable[RequestKind] = (), **fields: Any) -> bool:
        """Set a job's state and fields atomically.

        Return False if the transition is not allowed, or if a request in `unless` is open.
        """
        with self._write() as db:
            return not _pending_requests(db, job_id) & {*unless} and self._move(db, job_id, to, fields)

    def _move(self, db: sqlite3.Connection, job_id: int, to: JobState, fields: dict[str, Any]) -> bool:
        state = _state(db, job_id)
        if state is None or to not in TRANSITIONS[state]:
            return False
        fields = {**fields, "state": str(to)}
        if to.is_final:
            fields.setdefault("ended", time.time())
        if to.is_final or to == JobState.QUEUED:
            fields.setdefault("waits_for", None)
            db.execute("DELETE FROM leases WHERE job_id = ?", (job_id,))
        if to == JobState.QUEUED:
            # The job is queued again, so earlier requests are considered handled.
            db.execute("UPDATE requests SET handled = ? WHERE job_id = ? AND handled IS NULL", (time.time(), job_id))
            fields = {"queued": time.time(), "ended": None, "error": None} | fields
        _update(db, job_id, fields)
        return True

    def update(self, job_id: int, **fields: Any) -> None:
        """Set fields in a job; to change its state, use `transition`."""
        assert "state" not in fields
        with self._write() as db:
            _update(db, job_id, fields)

    def move(self, job_id: int, host: str) -> None:
        """Set the host name in a job's row and in its leases."""
        with self._write() as db:
            for table, key in (("jobs", "id"), ("leases", "job_id")):
                db.execute(f"UPDATE {table} SET host = ? WHERE {key} = ?", (host, job_id))

    # leases

    def lease(
        self, job: Job, gpus: Sequence[tuple[int, str]], space: Mapping[str, int] | None = None,
        most_gpus: int | None = None, **fields: Any,
    ) -> bool:  # fmt: skip
        """Lease GPUs to a job and change its state to `starting` in one transaction.

        The GPUs are given as pairs (index, UUID). Raise `LeaseConflict` if another job holds one of the GPUs, unless
        both jobs share the GPU and its memory suffices; `space` maps UUIDs to bytes of memory. Also raise it if the
        job's user would hold more than `most_gpus` GPUs, or if the job's array already has its maximum number of active
        jobs. Return False if the job may no longer start.
        """
        with self._write() as db:
            _refuse_beyond_limits(db, job, len(gpus), most_gpus)
            for index, uuid in gpus:
                query = "SELECT job_id, user FROM leases WHERE host = ? AND gpu_uuid = ? AND job_id != ?"
                query += " AND NOT shared" if job.shares_gpus else ""
                if holder := db.execute(query, (job.host, uuid, job.id)).fetchone():
                    raise LeaseConflict(f"GPU {index} is held by job {holder['job_id']} ({holder['user']})")
                taken_bytes = db.execute(_TAKEN, (job.host, uuid, job.id)).fetchone()[0]
                if taken_bytes and (space or {}).get(uuid, taken_bytes) < taken_bytes + (job.card_memory_bytes or 0):
                    raise LeaseConflict(f"GPU {index} has too little memory for all jobs that share it")
            if not self._move(db, job.id, JobState.STARTING, fields):
                return False
            _take(db, job, gpus)
            return True

    def leases(self) -> list[Lease]:
        rows = self._select("SELECT * FROM leases ORDER BY host, gpu_index, since")
        return list(readable([row | {"shared": bool(row.get("shared"))} for row in rows], Lease))

    # ranks

    def record_rank(self, rank: Rank) -> None:
        """Record how a rank was started or how it exited; replace any earlier row for the same rank."""
        row = msgspec.structs.asdict(rank)
        marks = ", ".join("?" * len(row))
        with self._write() as db:
            db.execute(f"INSERT OR REPLACE INTO ranks({', '.join(row)}) VALUES({marks})", tuple(row.values()))

    def ranks(self, job_id: int) -> list[Rank]:
        rows = self._select(f"SELECT * FROM ranks WHERE job_id = {int(job_id)} ORDER BY attempt, rank")
        return list(readable(rows, Rank))

    # requests

    def request(self, job_id: int, kind: RequestKind) -> None:
        """Record a request to stop, pause, finish or kill a job.

        The job's supervisor and rank 0 poll for requests twice a second.
        """
        with self._write() as db:
            db.execute("INSERT INTO requests(job_id, kind, created) VALUES(?, ?, ?)", (job_id, kind, time.time()))

    def open_requests(self, job_id: int) -> set[RequestKind]:
        """Return the kinds of a job's open requests; all requests are closed when the job is queued."""
        with explain_errors(self.path):
            return _pending_requests(self._db, job_id)

    def answer(self, job_id: int, kind: RequestKind) -> None:
        """Mark all requests of one kind for a job as handled."""
        with self._write() as db:
            answered = "UPDATE requests SET handled = ? WHERE job_id = ? AND kind = ? AND handled IS NULL"
            db.execute(answered, (time.time(), job_id, kind))

    def requests_to_queued(self) -> dict[int, set[RequestKind]]:
        """Return the kinds of open requests to queued jobs, by job id; jobs without requests are missing."""
        query = "SELECT job_id, kind FROM requests JOIN jobs ON jobs.id = job_id WHERE handled IS NULL AND state = "
        found: dict[int, set[RequestKind]] = {}
        for row in self._select(f"{query}'{JobState.QUEUED}'"):
            found.setdefault(row["job_id"], set()).add(row["kind"])
        return found

    # the queue

    def fingerprint(self) -> str:
        """Return a string that changes whenever the queue does: its jobs, the requests to them, or the leases.

        It does not change with the progress of running jobs. For 1,000 jobs, this takes about 2 ms.
        """
        states = ", ".join(f"'{state}'" for state in ACTIVE)
        columns = ("id", "state", "held", "priority", '"after"', "queued", "supervisor_pid", "gpus_wanted", "host")
        jobs = " || ' ' || ".join(f"coalesce({column}, '')" for column in columns)
        parts = [
            f"SELECT group_concat(word, ';') FROM (SELECT {jobs} AS word FROM jobs WHERE state IN ({states}))",
            "SELECT group_concat(gpu_uuid || ' ' || job_id, ';') FROM leases",
            "SELECT group_concat(job_id || ' ' || kind, ';') FROM requests WHERE handled IS NULL",
        ]
        (row,) = self._select("SELECT " + ", ".join(f"({part}) AS part{n}" for n, part in enumerate(parts)))
        return "|".join(str(value) for value in row.values())

    def record_waits(self, waits: Iterable[tuple[int, str, bool]]) -> None:
        """In one transaction, record why jobs wait, and add an event for each job whose flag is set."""
        with self._write() as db:
            for job_id, reason, is_news in waits:
                _update(db, job_id, {"waits_for": reason})
                if is_news:
                    db.execute(_ADD_EVENT, (job_id, time.time(), "info", "waiting", f"waits: {reason}"))

    # events

    def add_event(self, job_id: int, kind: str, message: str, level: str = "info") -> None:
        with self._write() as db:
            db.execute(_ADD_EVENT, (job_id, time.time(), level, kind, message))

    def events(self, job_id: int) -> list[Event]:
        """Return the readable events for a job, oldest first."""
        rows = self._select(
            f"SELECT timestamp, level, kind, message FROM events WHERE job_id = {int(job_id)} ORDER BY id"
        )
        return list(readable(rows, Event))

    def last_event(self) -> int:
        """Return the number of the latest event for any job, or 0 if there are no events."""
        return int(self._select("SELECT coalesce(max(id), 0) AS last FROM events")[0]["last"])

    def news(self, kinds: Iterable[str], after: int) -> list[tuple[int, Event]]:
        """Return the readable events of the given kinds after event number `after`, each with its job id."""
        rows = self._select(f"SELECT * FROM events WHERE id > {int(after)} ORDER BY id")
        wanted = [row for row in rows if row["kind"] in {*kinds}]
        return [(row["job_id"], event) for row in wanted for event in readable([row], Event)]

    def _select(self, query: str) -> list[dict[str, Any]]:
        with explain_errors(self.path):
            return _dicts(self._db, query)

    @contextlib.contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        change = savepoint if self._together else transaction
        with explain_errors(self.path), change(self._db) as db:
            yield db


# A paused job is queued again without its GPUs, so use the number of GPUs that it wants.
_GPU_USE = (
    "SELECT id, user, state, priority, queued, started, ended, energy_s, CASE WHEN state = 'queued' THEN gpus_wanted"
    " WHEN json_valid(gpu_uuids) THEN json_array_length(gpu_uuids) ELSE 0 END AS n_gpus FROM jobs"
    " WHERE host = ? AND started IS NOT NULL AND (ended IS NULL OR ended > ?)"
)
_HELD = "SELECT count(DISTINCT gpu_uuid) FROM leases WHERE host = ? AND user = ? AND job_id != ?"
_ACTIVE_IN_ARRAY = (
    "SELECT count(*) FROM jobs WHERE array = ? AND id != ? AND state IN ('starting', 'running', 'stalled', 'stopping')"
)
_TAKEN = "SELECT total(memory_bytes) FROM leases WHERE host = ? AND gpu_uuid = ? AND job_id != ?"
_WITHOUT = (
    'UPDATE jobs SET "after" = (SELECT json_group_array(value) FROM json_each(jobs."after") WHERE value != ?)'
    ' WHERE CASE json_valid("after") WHEN 1 THEN ? IN (SELECT value FROM json_each(jobs."after")) END'
)
_ADD_EVENT = "INSERT INTO events(job_id, timestamp, level, kind, message) VALUES(?, ?, ?, ?, ?)"


def _dicts(db: sqlite3.Connection, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
    try:
        return [dict(row) for row in db.execute(query, values)]
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
    # One value that is not UTF-8 makes the entire query fail. Read such a value as bytes, so that only its own row is
    # unreadable.
    db.text_factory = _text_or_bytes
    return [dict(row) for row in db.execute(query, values)]


def _text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def limit_of_user(user: str, held: int, most: int, wanted: int) -> str:
    """Return why a user's job must wait, like `ann has 4 of 4 GPUs that the policy allows`."""
    needs = f", and this job needs {wanted}" if wanted > 1 and held < most else ""
    return f"{user} has {held} of {plural(most, 'GPU')} that the policy allows{needs}"


def limit_of_array(array: int, active: int, most: int) -> str:
    """Return why a job in an array must wait, like `4 of at most 4 jobs of array 12 are active`."""
    return f"{active} of at most {plural(most, 'job')} of array {array} {'is' if most == 1 else 'are'} active"


def _refuse_beyond_limits(db: sqlite3.Connection, job: Job, n_gpus: int, most_gpus: int | None) -> None:
    """Raise `LeaseConflict` if a job may not start because of its user's or its array's other jobs."""
    held = db.execute(_HELD, (job.host, job.user, job.id)).fetchone()[0] if n_gpus and most_gpus is not None else 0
    if most_gpus is not None and n_gpus and held + n_gpus > most_gpus:
        raise LeaseConflict(limit_of_user(job.user, held, most_gpus, n_gpus))
    if job.array is not None and job.queue_limit:
        active = db.execute(_ACTIVE_IN_ARRAY, (job.array, job.id)).fetchone()[0]
        if active >= job.queue_limit:
            raise LeaseConflict(limit_of_array(job.array, active, job.queue_limit))


def _free_number(db: sqlite3.Connection, above: int) -> int:
    """Return a free id above `above` and all job ids, ignoring absurdly large ids from corrupt rows."""
    largest_id = "SELECT max(id) FROM jobs WHERE id < ?"
    number = 1 + max(db.execute(largest_id, (LARGEST_ID // 2,)).fetchone()[0] or 0, above)
    while db.execute("SELECT 1 FROM jobs WHERE id = ?", (number,)).fetchone():
        number += 1
    return number


def _put(db: sqlite3.Connection, job: Job) -> None:
    """Insert a job with its id, and with GPU leases if a job in its state holds GPUs."""
    holds = not job.state.is_final and job.state != JobState.QUEUED
    _insert(db, to_row(job))
    _take(db, job, zip(job.gpu_ids, job.gpu_uuids, strict=False) if holds else ())


def _state(db: sqlite3.Connection, job_id: int) -> JobState | None:
    rows = _dicts(db, f"SELECT state FROM jobs WHERE id = {int(job_id)}")
    if rows and rows[0]["state"] not in _STATES:
        raise Unreadable([job_id])
    return JobState(rows[0]["state"]) if rows else None


def _pending_requests(db: sqlite3.Connection, job_id: int) -> set[RequestKind]:
    rows = _dicts(db, f"SELECT kind FROM requests WHERE job_id = {int(job_id)} AND handled IS NULL")
    return {row["kind"] for row in rows if row["kind"] in _REQUESTS}


def _insert(db: sqlite3.Connection, row: dict[str, Any]) -> int:
    marks = ", ".join("?" * len(row))
    # Quote the names because "after" is an SQL keyword.
    names = ", ".join(f'"{name}"' for name in row)
    return int(db.execute(f"INSERT INTO jobs({names}) VALUES({marks})", tuple(row.values())).lastrowid or 0)


def _take(db: sqlite3.Connection, job: Job, gpus: Iterable[tuple[int, str]]) -> None:
    columns = "host, gpu_uuid, gpu_index, job_id, user, pid, since, shared, memory_bytes"
    whose = (job.id, job.user, os.getpid(), time.time(), job.shares_gpus, job.card_memory_bytes)
    db.executemany(
        f"INSERT OR REPLACE INTO leases({columns}) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [(job.host, uuid, index, *whose) for index, uuid in gpus],
    )


def _update(db: sqlite3.Connection, job_id: int, fields: dict[str, Any]) -> None:
    unknown = fields.keys() - set(Job.__struct_fields__)
    assert not unknown, unknown
    values = as_columns(fields)
    db.execute(
        "UPDATE jobs SET {} WHERE id = ?".format(", ".join(f'"{name}" = ?' for name in values)),
        (*values.values(), job_id),
    )
