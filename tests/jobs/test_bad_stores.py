"""Tests that invalid values in `metrics.db` and `gpu.db`, or invalid stores, do not affect anything else."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sae_tui import cli
from sae_tui.compare.export import write_table
from sae_tui.compare.runs import Runs
from sae_tui.compare.tables import results
from sae_tui.gpu import stored
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.history import Recorder
from sae_tui.gpu.ring import Ring, RingReading
from sae_tui.gpu.upkeep import MINUTE_S
from sae_tui.jobs.live import LiveRun
from sae_tui.jobs.view.reader import JobReader, JobsReader
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.curves import members_of
from sae_tui.panels.headline import headline
from sae_tui.widgets.plot import braille, y_range
from trainer.contract.process import ProcessRef
from trainer.contract.store import database
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.rows import Event

HUGE = 2**63 - 1
NOW = time.time()
HOST = socket.gethostname()
PARSER = cli.make_parser(lambda *_: None)
VALUES = st.one_of(
    st.none(),
    st.sampled_from([0, 1, -1, HUGE, -HUGE - 1, 2**53, 1.5, 5e-324, 1e308, -1e308, 1e101, float("inf"), -float("inf")]),
    st.sampled_from(["", "a", "12", "nan", "\0", "\x1b]2;x\x07", "fvu@", "loss", b"", b"\xff", b"\x00" * 9, int(NOW)]),
    st.integers(-5, 50),
)
COLUMNS = {
    "keys": 2, "metrics": 5, "rollups": 8, "heartbeat": 7, "events": 5, "gpu_metrics": 11, "gpu_minutes": 12,
}  # fmt: skip


def rows_of(*tables: str) -> st.SearchStrategy[list[tuple[str, list[object]]]]:
    """Return a strategy for rows with arbitrary values; some rows have the keys of existing rows."""
    likely = {"gpu_metrics": [HOST, 0, NOW - 30], "gpu_minutes": [HOST, 0, int(NOW) // 60], "metrics": [1, 0, 5]}

    def row(table: str) -> st.SearchStrategy[tuple[str, list[object]]]:
        n_kept = st.integers(0, len(likely.get(table, [])))
        anything = st.lists(VALUES, min_size=COLUMNS[table], max_size=COLUMNS[table])
        return st.builds(lambda n, values: (table, [*likely.get(table, [])[:n], *values[n:]]), n_kept, anything)

    return st.lists(st.one_of(*map(row, tables)), min_size=1, max_size=5)


def put(file: Path, rows: list[tuple[str, list[object]]]) -> None:
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        for table, values in rows:
            with contextlib.suppress(sqlite3.IntegrityError):
                db.execute(f"INSERT OR REPLACE INTO {table} VALUES({', '.join('?' * len(values))})", values)


def tried(examples: int) -> Callable:
    return settings(
        max_examples=examples, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@pytest.fixture
def two_runs(box, monkeypatch) -> tuple[int, int]:
    """Record two running jobs with valid metrics; the test corrupts the second job's metrics."""
    monkeypatch.setattr(database, "network_file_system", lambda _: None)
    me = ProcessRef.current()
    alive = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id, "attempt": 1}
    ids = [box.record(name, state="running", started=NOW - 60, **alive) for name in ("good", "bad")]
    for job_id in ids:
        box.data.run(job_id).create()
        writer = SeriesWriter(box.data.run(job_id).metrics_db)
        rows = [MetricRow(name, step, 0.5) for name in ("loss", "fvu") for step in range(0, 50, 5)]
        event = Event(timestamp=NOW, level="info", kind="saved", message="step 5")
        writer.write(rows, Heartbeat("training", 50, 100, 500, NOW), [event])
        writer.close()
    return ids[0], ids[1]


def look_at(box, good: int, bad: int) -> None:
    """Use the metrics of both jobs as the app and the commands do."""
    flags = ["--data-dir", str(box.data.root)]
    for command in ("jobs", "jobs --json", f"job {bad}", f"compare {bad} {good}", f"compare {bad} {good} --json"):
        assert cli._run(PARSER.parse_args([*command.split(), *flags])) == 0
    jobs = JobsReader(box.data)
    jobs.poll()
    assert {job.id: job.loss for job in jobs.jobs}[good] == 0.5
    jobs.close()
    for job_id in (good, bad):
        reader = JobReader(box.data, job_id)
        reader.poll()
        series = {key: tuple(points) for key, points in reader.series.items()}
        detail = JobDetail(reader.view, reader.phase, series, reader.events, (), 0, None)
        headline(detail, 80, *members_of(detail)[:1])
        for points in filter(None, series.values()):
            drawn = [(point.step, point.value) for point in points if point.value is not None]
            if drawn:
                braille(drawn, 40, 8, *y_range([y for _, y in drawn], from_zero=True))
        reader.close()
    compare(box, good, bad)


def compare(box, good: int, bad: int) -> None:
    with contextlib.closing(Runs(box.data, [good, bad])) as runs:
        curves = runs.read("loss")
        assert [sample.value for sample in curves.curves[0].samples] == [0.5] * 10
        results(curves.saes)
        for metric in curves.metrics:
            runs.read(metric)
        write_table(box.data.root / "a.csv", runs, "", force=True)


@pytest.mark.slow
def test_a_runs_corrupt_metrics_do_not_hide_the_metrics_of_other_runs(box, two_runs, capsys):
    good, bad = two_runs
    file, pristine = box.data.run(bad).metrics_db, box.data.root / "pristine.db"
    shutil.copy(file, pristine)

    @tried(120)
    @given(rows=rows_of("keys", "metrics", "rollups", "heartbeat", "events"))
    def try_one(rows):
        for beside in ("-wal", "-shm"):
            Path(f"{file}{beside}").unlink(missing_ok=True)
        shutil.copy(pristine, file)
        put(file, rows)
        look_at(box, good, bad)
        # Use the run as its supervisor does, and as a rank or supervisor that resumes it would.
        run = LiveRun(box.data.run(bad))
        run.poll()
        box.control.update(bad, **run.fields())
        assert box.job(bad).id == bad
        run.close()
        writer = SeriesWriter(file)
        writer.rewind(Heartbeat("resuming", 20, 100, 200, NOW))
        writer.write([MetricRow("loss", 25, 0.25)], None)
        writer.close()

    try_one()
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture
def gpu_db(box, monkeypatch) -> Path:
    """Store one minute of readings from a GPU."""
    monkeypatch.setattr(database, "network_file_system", lambda _: None)
    box.data.create()
    database.open_writer(box.data.gpu_db, "gpu").close()
    put(
        box.data.gpu_db,
        [
            ("gpu_metrics", [HOST, 0, NOW - ago, "GPU-a", 50, 2**30, 2**34, 40, 100.0, None, None])
            for ago in range(30, 90)
        ],
    )
    return box.data.gpu_db


@pytest.mark.slow
def test_corrupt_gpu_history_does_not_prevent_reading_or_writing_the_rest(box, gpu_db):
    pristine = box.data.root / "pristine.db"
    shutil.copy(gpu_db, pristine)
    ring = Ring()
    ring.extend_history([RingReading(NOW - 1, 50, 2**30, 40, 100.0)], "GPU-a")
    sample = GpuSample(0, "GPU-a", "H100", NOW, memory_total_bytes=2**34)
    sampler = SimpleNamespace(latest=lambda: [sample], ring=lambda _: ring)

    @tried(150)
    @given(rows=rows_of("gpu_metrics", "gpu_minutes"))
    def try_one(rows):
        for beside in ("-wal", "-shm"):
            Path(f"{gpu_db}{beside}").unlink(missing_ok=True)
        shutil.copy(pristine, gpu_db)
        put(gpu_db, rows)
        # Read the last day, because NOW is when the module was imported, which may be a while ago.
        assert len(stored.recent(gpu_db, HOST, 86_400)["GPU-a"]) >= 59
        for step_s in (None, 10, MINUTE_S):
            points = list(stored.stored_samples(gpu_db, HOST, NOW - 600, step_s=step_s))
            # Per-minute means replace later samples, even if the means are from 1970.
            assert step_s == MINUTE_S or any(row.gpu_uuid == "GPU-a" for row in points)
            for total in stored.totals(points):
                assert f"{total.average_utilization or 0:.0f} {total.total_power_w or 0:.0f}"
        stored.last_busy(gpu_db, HOST, 0, "GPU-a", NOW - 600)
        recorder = Recorder(sampler, box.data)
        recorder._upkeep._first = False
        recorder._write(NOW)
        recorder._write(NOW + 120)
        recorder._file.close()

    try_one()


def spoilt(file: Path, how: str) -> None:
    """Make a store invalid in the given way."""
    if how == "no table":
        with contextlib.closing(sqlite3.connect(file)) as db, db:
            for table in ("metrics", "heartbeat", "gpu_metrics", "gpu_minutes"):
                db.execute(f"DROP TABLE IF EXISTS {table}")
    elif how == "newer":
        with contextlib.closing(sqlite3.connect(file)) as db, db:
            db.execute("PRAGMA user_version = 99")
    elif how == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.write_bytes(b"" if how == "empty" else b"no database, but long enough to be read as one" * 100)


def test_an_invalid_store_does_not_prevent_the_app_from_showing_everything_else(box, two_runs, gpu_db, capsys):
    good, bad = two_runs
    flags = ["--data-dir", str(box.data.root), "--gpu-source", "simulated"]
    files = {file: file.read_bytes() for file in (box.data.run(bad).metrics_db, gpu_db)}
    for how in ("no table", "newer", "cut", "empty", "no database"):
        for file, content in files.items():
            file.write_bytes(content)
            spoilt(file, how)
        look_at(box, good, bad)
        for command in ("metrics", "gpus", "metrics --since 1h"):
            assert cli._run(PARSER.parse_args([*command.split(), *flags])) in ((0, 1) if "since" in command else (0,))
        assert len(capsys.readouterr().err.splitlines()) <= 1
