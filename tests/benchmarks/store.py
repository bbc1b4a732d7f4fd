"""Measures how long screens wait for the store with many long runs, and how much reporting slows down training.

    python tests/benchmarks/store.py [--steps 1_000_000] [--runs 1000] [--without-peer]

Creates ten series with `--steps` values each in one `metrics.db`, a list of `--runs` jobs, and a second writer that
sometimes locks the store. Every result is printed with its target. For comparison, a peer stores one JSON string per
step and reads all of them at every refresh, as trackio does. The benchmark needs 1 GiB of disk space.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sae_tui.jobs.view.reader import JobReader, JobsReader
from trainer.contract.paths import DataDir
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesReader, SeriesWriter
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState
from trainer.reporting.progress import StoredProgress

SERIES = tuple(f"metric_{number}" for number in range(10))
REPEATS = 20
PEER = "reading the entire run as JSON, as trackio does"
# A program that locks the store for 0.3 s out of every 0.5 s.
LOCKER = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
while True:
    db.execute("BEGIN IMMEDIATE")
    time.sleep(0.3)
    db.execute("COMMIT")
    time.sleep(0.2)
"""
STEPS = "WITH RECURSIVE steps(step) AS (SELECT 1 UNION ALL SELECT step + 1 FROM steps WHERE step < ?)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--without-peer", action="store_true")
    options = parser.parse_args()
    title = f"{len(SERIES) * options.steps:,} rows in a run, {options.runs:,} runs, ms"
    table = Table(title=title)
    for name in ("operation", "p50", "p99", "target", "p99 of target"):
        table.add_column(name, justify="left" if name == "operation" else "right")
    with tempfile.TemporaryDirectory() as folder:
        data = DataDir(Path(folder))
        job_id = record_runs(data, options.runs)
        fill_metrics(data.run(job_id).metrics_db, options.steps)
        timings = refreshes(data, job_id, options.steps) | lists(data, job_id) | reporting(Path(folder))
        if not options.without_peer:
            timings[PEER] = ([peer(Path(folder), options.steps)], None)
    for what, (times, wanted) in timings.items():
        add(table, what, times, wanted)
    console = Console(width=120)
    console.print(table)
    if peers := timings.get(PEER):
        ratio = peers[0][0] / statistics.median(timings["refreshing a job with 200 new rows"][0])
        console.print(f"the peer's refresh takes {ratio:,.0f} times as long", highlight=False)


def add(table: Table, what: str, times: list[float], wanted: float | None) -> None:
    middle, late = statistics.median(times), sorted(times)[int(0.99 * (len(times) - 1))]
    share = [f"{wanted:g}", f"{late / wanted:.0%}"] if wanted else ["", ""]
    table.add_row(what, f"{middle:,.3f}", f"{late:,.3f}", *share)


def timed(action: Callable[[], object]) -> float:
    """Return the duration of an action in milliseconds."""
    began = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - began)


def record_runs(data: DataDir, n_runs: int) -> int:
    """Record finished jobs and a running job; return the running job's id."""
    config, _ = parse_job({"data": {"source": "synthetic"}, "sae": {"d_sae": 64}})
    data.create()
    fields = {"config": dump_job(config), "user": "ann", "host": "box", "device": "cpu", "gpu_source": "none"}
    with contextlib.closing(Control(data.control_db)) as control:
        ids = [control.create_job(Job(name=f"run {number}", **fields)) for number in range(n_runs)]
        for job_id in ids:
            control.transition(job_id, JobState.STARTING)
            control.transition(job_id, JobState.RUNNING)
            if job_id != ids[-1]:
                control.transition(job_id, JobState.FINISHED, step=100, fvu=0.1)
    data.run(ids[-1]).create()
    return ids[-1]


def fill_metrics(path: Path, n_steps: int) -> None:
    """Fill the store with the rows that rank 0 would have written one at a time."""
    with contextlib.closing(SeriesWriter(path)) as writer:
        writer.write([MetricRow(name, 0, 0.0) for name in SERIES], Heartbeat("training", n_steps, 2 * n_steps, 0, 0.0))
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        for (key,) in db.execute("SELECT id FROM keys").fetchall():
            row = f"SELECT {key}, 0, step, 0.0, abs(random()) / 1e19 FROM steps"
            db.execute(f"{STEPS} INSERT INTO metrics {row}", (n_steps,))
        for level, shift in ((1, 6), (2, 12)):
            values = "count(value), sum(value), min(value), max(value)"
            grouped = f"SELECT key_id, rank, {level}, step >> {shift}, {values} FROM metrics GROUP BY 1, 2, 4"
            db.execute(f"INSERT OR REPLACE INTO rollups {grouped}")


def refreshes(data: DataDir, job_id: int, n_steps: int) -> dict[str, tuple[list[float], float | None]]:
    """Measure how long a job's screen takes to refresh."""
    path = data.run(job_id).metrics_db
    first, later, idle = [], [], []
    for _ in range(3):
        with contextlib.closing(JobReader(data, job_id)) as reader:
            first.append(timed(reader.poll))
    with contextlib.closing(JobReader(data, job_id)) as reader, contextlib.closing(SeriesWriter(path)) as writer:
        reader.poll()
        for number in range(REPEATS):
            steps = range(n_steps + 20 * number, n_steps + 20 * (number + 1))
            rows = [MetricRow(name, step, 0.5) for name in SERIES for step in steps]
            writer.write(rows, Heartbeat("training", steps[-1], 2 * n_steps, 0, 0.0))
            later.append(timed(reader.poll))
            idle.append(timed(reader.poll))
    with contextlib.closing(SeriesReader(path)) as series:
        charts = [timed(lambda: series.history(SERIES[0], most=500)) for _ in range(REPEATS)]
    return {
        "opening a job": (first, None),
        "refreshing a job with 200 new rows": (later, 20.0),
        "refreshing a job without new rows": (idle, None),
        "reading the entire history of a series": (charts, 50.0),
    }


def lists(data: DataDir, job_id: int) -> dict[str, tuple[list[float], float | None]]:
    """Measure how long the jobs list takes to refresh."""
    first, changed = [], []
    for _ in range(5):
        with contextlib.closing(JobsReader(data)) as reader:
            first.append(timed(reader.poll))
    with contextlib.closing(JobsReader(data)) as reader, contextlib.closing(Control(data.control_db)) as control:
        reader.poll()
        for step in range(REPEATS):
            control.update(job_id, step=step)
            changed.append(timed(reader.poll))
    return {"opening the list of jobs": (first, 100.0), "refreshing the list after a change": (changed, 100.0)}


def reporting(folder: Path) -> dict[str, tuple[list[float], float | None]]:
    """Measure how long the training thread takes to report 30 values at every step."""
    path = folder / "reported.db"
    progress = StoredProgress(path, 5000, threading.Event(), None)
    progress.rows([MetricRow("loss", 0, 1.0)])
    while not path.exists() or path.stat().st_size == 0:
        time.sleep(0.01)
    with subprocess.Popen([sys.executable, "-c", LOCKER, str(path)]) as locker:
        times = []
        for step in range(1, 5001):
            # Simulate a training step.
            time.sleep(0.001)
            times.append(timed(lambda step=step: report(progress, step)))
        locker.kill()
    progress.close()
    return {"reporting a step while the store is sometimes locked": (times, 0.1)}


def report(progress: StoredProgress, step: int) -> None:
    progress.rows([MetricRow(f"metric_{number}", step, 0.5) for number in range(30)])
    progress.heartbeat("training", step, 4096 * step)


def peer(folder: Path, n_steps: int) -> float:
    """Return the duration of one refresh by the peer in milliseconds."""
    with contextlib.closing(sqlite3.connect(folder / "peer.db")) as db, db:
        db.execute("CREATE TABLE metrics(id INTEGER PRIMARY KEY, run TEXT, step INTEGER, metrics TEXT)")
        pairs = ", ".join(f"'{name}', abs(random()) / 1e19" for name in SERIES)
        db.execute(f"{STEPS} INSERT INTO metrics SELECT step, 'run', step, json_object({pairs}) FROM steps", (n_steps,))
        db.execute("CREATE INDEX by_run ON metrics(run, step)")

        def read() -> list[dict[str, float]]:
            rows = db.execute("SELECT * FROM metrics WHERE run = 'run' ORDER BY step").fetchall()
            return [json.loads(row[3]) | {"step": row[2]} for row in rows]

        return timed(read)


if __name__ == "__main__":
    main()
