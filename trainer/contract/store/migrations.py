"""The store schemas as append-only lists of migrations; `PRAGMA user_version` is the number of migrations applied.

A new store is created without sqlite-utils, directly from the SQL for the latest schema, which `make schemas` writes.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sqlite_utils import Database

Schema = Literal["control", "metrics", "gpu"]
Step = Callable[["Database"], None]


def control_001(db: Database) -> None:
    """Create the tables for jobs, their ranks and events, GPU leases, and requests to running jobs."""
    db.table("jobs").create(
        {
            "id": int, "name": str, "state": str, "config": str, "user": str, "host": str, "device": str,
            "gpu_source": str, "gpu_ids": str, "gpu_uuids": str, "distributed": int, "world_size": int, "mode": str,
            "boot_id": str, "supervisor_pid": int, "supervisor_start": int, "attempt": int, "parent": int,
            "created": float, "started": float, "ended": float, "step": int, "total_steps": int, "tokens": int,
            "loss": float, "fvu": float, "l0": float, "dead_fraction": float, "tokens_per_s": float,
            "error": str, "output_path": str,
        },
        pk="id",
        not_null={"name", "state", "config", "host", "device", "world_size", "created", "attempt", "step", "tokens"},
        defaults={"attempt": 0, "step": 0, "tokens": 0},
    )  # fmt: skip
    db.table("jobs").create_index(["state", "id"])
    db.table("ranks").create(
        {"job_id": int, "attempt": int, "rank": int, "pid": int, "start_ticks": int, "boot_id": str,
         "exit_code": int, "exit_signal": int, "ended": float, "error": str},
        pk=("job_id", "attempt", "rank"),
    )  # fmt: skip
    db.table("leases").create(
        {"host": str, "gpu_uuid": str, "gpu_index": int, "job_id": int, "user": str, "pid": int, "since": float},
        pk=("host", "gpu_uuid"),
        not_null={"job_id", "since"},
    )
    db.table("requests").create(
        {"id": int, "job_id": int, "kind": str, "created": float, "handled": float}, pk="id"
    ).create_index(["job_id", "id"])
    db.table("events").create(
        {"id": int, "job_id": int, "timestamp": float, "level": str, "kind": str, "message": str}, pk="id"
    ).create_index(["job_id", "id"])


def control_002(db: Database) -> None:
    """Add a job's estimated and peak device memory, and the dimensions of its data."""
    for name in ("d_in", "d_out", "estimated_memory_bytes", "peak_memory_bytes"):
        db.table("jobs").add_column(name, int)


# The number of GPUs in a row's list; 0 for a corrupt list, which `repair` fixes later.
_N_GPUS = "CASE WHEN json_valid(gpu_ids) THEN json_array_length(gpu_ids) ELSE 0 END"


def control_003(db: Database) -> None:
    """Add columns for the queue (order, holds, dependencies, choice of GPUs), shared GPUs, tags and notes."""
    jobs = db.table("jobs")
    for name, kind, default in (
        ("priority", int, 0),
        ("held", int, 0),
        ("after", str, "[]"),
        ("queued", float, None),
        ("gpus_wanted", int, 0),
        ("any_gpus", int, 0),
        ("shares_gpus", int, 0),
        ("card_memory_bytes", int, None),
        ("expected_s", float, None),
        ("waits_for", str, None),
        ("max_restarts", int, 0),
        ("restarts", int, 0),
        ("backend", str, "local"),
        ("tags", str, "[]"),
        ("note", str, ""),
    ):
        jobs.add_column(name, kind, not_null_default=default)
    db.execute(f"UPDATE jobs SET queued = created, gpus_wanted = {_N_GPUS}")
    leases = db.table("leases")
    leases.add_column("shared", int, not_null_default=0)
    leases.add_column("memory_bytes", int)
    leases.transform(pk=("host", "gpu_uuid", "job_id"))


def control_004(db: Database) -> None:
    """Add a column for the value of CUDA_VISIBLE_DEVICES at launch."""
    db.table("jobs").add_column("visible_devices", str)


def control_005(db: Database) -> None:
    """Add the energy used by a job's GPUs, and the GPU-seconds held, measured, and read from an energy counter."""
    for name in ("energy_wh", "energy_s", "energy_known_s", "energy_counted_s"):
        db.table("jobs").add_column(name, float)


def control_006(db: Database) -> None:
    """Add a job's latest metrics on held-out rows."""
    for name in ("heldout_fvu", "heldout_l0"):
        db.table("jobs").add_column(name, float)


def control_007(db: Database) -> None:
    """Set the state of imported SAEs to "imported" if they were never trained here."""
    imported = "SELECT job_id FROM events WHERE kind = 'imported'"
    db.execute(
        f"UPDATE jobs SET state = 'imported' WHERE state = 'finished' AND started IS NULL AND id IN ({imported})"
    )


def control_008(db: Database) -> None:
    """Add a machine id to each job, and remove deleted jobs from the dependency lists of other jobs.

    Before this version, a deleted job was considered finished; since then, a job waits for every job in its list.
    """
    db.table("jobs").add_column("machine_id", str)
    kept = 'SELECT json_group_array(value) FROM json_each(jobs."after") WHERE value IN (SELECT id FROM jobs)'
    db.execute(f'UPDATE jobs SET "after" = ({kept}) WHERE CASE json_valid("after") WHEN 1 THEN "after" != \'[]\' END')


def control_009(db: Database) -> None:
    """Add the overfitting warning."""
    db.table("jobs").add_column("overfitting", str)


def control_010(db: Database) -> None:
    """Add the first job of an array, and how many of the array's jobs may run at once."""
    db.table("jobs").add_column("array", int)
    db.table("jobs").add_column("array_limit", int)


def metrics_001(db: Database) -> None:
    """Create tables for metrics (clustered by key, rank and step), two levels of roll-ups, the heartbeat and events."""
    db.table("keys").create({"id": int, "name": str}, pk="id", not_null={"name"}).create_index(["name"], unique=True)
    # sqlite-utils does not support WITHOUT ROWID, which halves the file size (307 instead of 598 MB for 10 million
    # rows).
    db.execute(
        "CREATE TABLE metrics(key_id INTEGER, rank INTEGER, step INTEGER, timestamp REAL, value REAL,"
        " PRIMARY KEY(key_id, rank, step)) WITHOUT ROWID"
    )
    db.execute(
        "CREATE TABLE rollups(key_id INTEGER, rank INTEGER, level INTEGER, bucket INTEGER, n INTEGER, total REAL,"
        " low REAL, high REAL, PRIMARY KEY(key_id, rank, level, bucket)) WITHOUT ROWID"
    )
    db.table("heartbeat").create(
        {"id": int, "phase": str, "step": int, "total_steps": int, "tokens": int, "timestamp": float, "dropped": int},
        pk="id",
    )
    db.table("events").create({"id": int, "timestamp": float, "level": str, "kind": str, "message": str}, pk="id")


def metrics_002(db: Database) -> None:
    """Add a table with one row per deletion of points, so that readers notice that earlier points are invalid."""
    db.table("rewinds").create({"id": int, "timestamp": float, "step": int}, pk="id")


def gpu_001(db: Database) -> None:
    """Create a table with one row per GPU and sample, and a table with one row per GPU and minute."""
    db.execute(
        "CREATE TABLE gpu_metrics(host TEXT, gpu_index INTEGER, timestamp REAL, gpu_uuid TEXT, utilization INTEGER,"
        " memory_used INTEGER, memory_total INTEGER, temperature INTEGER, power_draw REAL, job_id INTEGER,"
        " PRIMARY KEY(host, gpu_index, timestamp)) WITHOUT ROWID"
    )
    db.execute(
        "CREATE TABLE gpu_minutes(host TEXT, gpu_index INTEGER, minute INTEGER, gpu_uuid TEXT, n INTEGER,"
        " utilization REAL, utilization_max INTEGER, memory_used INTEGER, memory_total INTEGER, temperature INTEGER,"
        " power_draw REAL, job_id INTEGER, PRIMARY KEY(host, gpu_index, minute)) WITHOUT ROWID"
    )


def gpu_002(db: Database) -> None:
    """Add the value of the GPU driver's energy counter, in J; only some samples have this value."""
    db.execute("ALTER TABLE gpu_metrics ADD COLUMN energy REAL")


MIGRATIONS: dict[Schema, tuple[Step, ...]] = {
    "control": (
        control_001, control_002, control_003, control_004, control_005, control_006, control_007, control_008,
        control_009, control_010,
    ),
    "metrics": (metrics_001, metrics_002),
    "gpu": (gpu_001, gpu_002),
}  # fmt: skip


# The SQL files for creating the tables in a new store with the latest schema.
NEW = Path(__file__).parent / "new"


def statements_of_new(schema: Schema) -> list[str]:
    """Return the SQL statements for creating the tables in an empty store, without semicolons at the end."""
    return (NEW / f"{schema}.sql").read_text(encoding="utf-8").split(";\n\n")[:-1]


def migrate(path: Path, schema: Schema) -> None:
    """Apply all missing migrations, each atomically; several processes may call this concurrently."""
    from sqlite_utils import Database

    # Closing the connection rolls back a migration that failed halfway.
    with contextlib.closing(sqlite3.connect(path, timeout=10, isolation_level=None)) as connection:
        db = Database(connection)
        while _take_next_step(connection, db, MIGRATIONS[schema]):
            pass


def _take_next_step(connection: sqlite3.Connection, db: Database, steps: Sequence[Step]) -> bool:
    connection.execute("BEGIN IMMEDIATE")
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version < len(steps):
        steps[version](db)
        connection.execute(f"PRAGMA user_version={version + 1}")
    connection.execute("COMMIT")
    return version + 1 < len(steps)


if __name__ == "__main__":
    # Block these imports: if pandas is installed, sqlite-utils imports it, which takes four times as long as all the
    # rest.
    sys.modules |= dict.fromkeys(("numpy", "pandas"))  # type: ignore[arg-type]
    migrate(Path(sys.argv[2]), sys.argv[1])  # type: ignore[arg-type]
