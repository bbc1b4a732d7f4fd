"""Job files for commands, and the processes and samples that a running command leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from trainer.contract.paths import DataDir
from trainer.contract.process import ProcessRef
from trainer.contract.settings.job_file import any_job_of, dump_job
from trainer.contract.store.database import open_writer
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.rows import Rank


def command_file(*argv: str, name: str = "probe", **settings: Any) -> str:
    """Return the job file for a command."""
    table = {"kind": "command", "name": name, "command": {"argv": list(argv), **settings}}
    return dump_job(any_job_of(table))


def record_program(data: DataDir, job_id: int, pid: int) -> None:
    """Record a process as the program of a job's current attempt, as its supervisor would."""
    identity = ProcessRef.of(pid)
    assert identity is not None
    with contextlib.closing(Control(data.control_db)) as control:
        attempt = control.job(job_id).attempt
        control.record_rank(Rank(job_id=job_id, attempt=attempt, rank=0, **msgspec.structs.asdict(identity)))


def record_series(data: DataDir, job_id: int, names: Sequence[str], steps: int = 200, total_steps: int = 400) -> None:
    """Write series with arbitrary names, as if they came from a program's output."""
    paths = data.run(job_id)
    paths.create()
    rows = [MetricRow(name, step, 1 / (1 + step + place)) for place, name in enumerate(names) for step in range(steps)]
    with contextlib.closing(SeriesWriter(paths.metrics_db)) as writer:
        writer.write(rows, Heartbeat("running", steps, total_steps, 0, 0.0))


def record_samples(data: DataDir, host: str, index: int, uuid: str, begin: float, utilisation: Sequence[int]) -> None:
    """Store one GPU sample per second, with 2 GiB of memory in use."""
    with contextlib.closing(open_writer(data.gpu_db, "gpu")) as db:
        rows = [(host, index, begin + second, uuid, use, 2 << 30) for second, use in enumerate(utilisation)]
        query = "INSERT INTO gpu_metrics(host, gpu_index, timestamp, gpu_uuid, utilization, memory_used)"
        db.executemany(f"{query} VALUES(?, ?, ?, ?, ?, ?)", rows)
        minutes = {(host, index, int(row[2] // 60), uuid) for row in rows}
        db.executemany("INSERT INTO gpu_minutes(host, gpu_index, minute, gpu_uuid, n) VALUES(?, ?, ?, ?, 60)", minutes)
