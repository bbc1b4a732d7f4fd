"""Tests for `gpu.db`: which process writes it, how it is read, how long rows are kept, and how the file shrinks."""

from __future__ import annotations

import itertools
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sae_tui.gpu import history, upkeep
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.history import Recorder
from sae_tui.gpu.monitor import Monitor
from sae_tui.gpu.ring import RingReading
from sae_tui.gpu.sampler import Sampler
from sae_tui.gpu.simulated import Simulated, uuid_of
from sae_tui.gpu.stored import GpuTotals, recent, stored_samples, totals
from sae_tui.gpu.upkeep import Retention, Upkeep
from trainer.contract.locks import FileLock
from trainer.contract.paths import DataDir
from trainer.contract.store.database import StoreError, open_writer

Until = Callable[..., Any]
HOST = "box"
DAY = 86400.0


@pytest.fixture
def data_dir(tmp_path: Path) -> DataDir:
    data = DataDir(tmp_path)
    data.create()
    return data


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    """Take 200 samples per second from two GPUs together. The clock starts ten minutes ago and advances by 1 s per
    sample.
    """
    begin, ticks = time.time() - 600, itertools.count()
    started = Sampler(Simulated(2, clock=lambda: begin + next(ticks)), 0.01)
    yield started
    started.stop()


@pytest.fixture
def record(data_dir: DataDir, sampler: Sampler) -> Iterator[Callable[..., Recorder]]:
    """Return a function that starts recorders for the sampler; they are stopped after the test."""
    started: list[Recorder] = []

    def begin(**options: Any) -> Recorder:
        started.append(Recorder(sampler, data_dir, host=HOST, **{"every_s": 0.02, **options}))
        started[-1].start()
        return started[-1]

    yield begin
    for recorder in started:
        recorder.stop(5)


def rows(data_dir: DataDir, query: str = "SELECT * FROM gpu_metrics") -> list[sqlite3.Row]:
    if not data_dir.gpu_db.exists():
        return []
    with closing(sqlite3.connect(data_dir.gpu_db, timeout=10)) as db:
        db.row_factory = sqlite3.Row
        made = db.execute("PRAGMA user_version").fetchone()[0]
        return db.execute(query).fetchall() if made else []


def store(data_dir: DataDir, index: int, stamps: list[float], uuid: str | None = None, **values: Any) -> None:
    """Store samples as another process would, by default with the UUID of the simulated GPU at this index."""
    uuid = uuid or uuid_of(index)
    row = {"utilization": 50, "memory": 1000, "total": 2000, "temperature": 40, "power": 100.0, "job": None, **values}
    with closing(open_writer(data_dir.gpu_db, "gpu")) as db:
        db.executemany(
            "INSERT INTO gpu_metrics VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)",
            [(HOST, index, stamp, uuid, *row.values()) for stamp in stamps],
        )
        db.execute(history.ROLL_UP, (HOST, index, 0.0, uuid))


def test_every_sample_is_stored_once_with_the_job_using_its_gpu(
    data_dir: DataDir, record: Callable[..., Recorder], sampler: Sampler, until: Until
) -> None:
    recorder = record(jobs_by_uuid=lambda: {uuid_of(1): 7})
    until(lambda: len(rows(data_dir)) > 60)
    assert recorder.stop(5)
    sampler.stop()
    assert recorder.problem is None
    stored_rows = rows(data_dir)
    for index, job in ((0, None), (1, 7)):
        mine = [row for row in stored_rows if row["gpu_index"] == index]
        stamps = [row["timestamp"] for row in mine]
        assert stamps == sampler.ring(index).column("timestamp")[: len(stamps)]
        assert {(row["host"], row["gpu_uuid"], row["job_id"]) for row in mine} == {(HOST, uuid_of(index), job)}
        assert all(row["memory_total"] == 24 << 30 and row["power_draw"] > 0 for row in mine)


def test_the_energy_counter_is_stored_with_the_samples_that_contain_it(data_dir: DataDir, until: Until) -> None:
    class Counting(Simulated):
        def sample(self, index: int, *, processes: bool) -> GpuSample:
            return replace(super().sample(index, processes=processes), energy_j=4.5e6 if index else None)

    sampler = Sampler(Counting(2), 0.01)
    recorder = Recorder(sampler, data_dir, host=HOST, every_s=0.02)
    recorder.start()
    until(lambda: len(rows(data_dir)) > 5)
    assert recorder.stop(5)
    sampler.stop()
    assert {(row["gpu_index"], row["energy"]) for row in rows(data_dir)} == {(0, None), (1, 4.5e6)}


def test_stored_minutes_are_the_means_of_their_samples(
    data_dir: DataDir, record: Callable[..., Recorder], sampler: Sampler, until: Until
) -> None:
    recorder = record()
    until(lambda: len(rows(data_dir)) > 300)
    recorder.stop(5)
    query = (
        "SELECT gpu_index, CAST(timestamp / 60 AS INTEGER) AS minute, count(*) AS n, avg(utilization) AS mean,"
        " max(utilization) AS top, avg(power_draw) AS power FROM gpu_metrics GROUP BY 1, 2"
    )
    stored = rows(data_dir, "SELECT gpu_index, minute, n, utilization, utilization_max, power_draw FROM gpu_minutes")
    assert [tuple(row) for row in stored] == [tuple(row) for row in rows(data_dir, query)]
    assert len(stored) >= 4


def test_an_unreadable_gpu_leaves_no_rows(data_dir: DataDir, until: Until) -> None:
    sampler = Sampler(Simulated(2, faults={1: "lost"}), 0.01)
    recorder = Recorder(sampler, data_dir, host=HOST, every_s=0.02)
    recorder.start()
    until(lambda: len(rows(data_dir)) > 5)
    assert recorder.stop(5)
    sampler.stop()
    assert {row["gpu_index"] for row in rows(data_dir)} == {0}


def test_hosts_sharing_the_folder_store_separate_gpu_histories(
    data_dir: DataDir, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders, files = [], []
    for host in ("gpu7", "gpu8/lab"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        sampler = Sampler(Simulated(1), 0.01)
        recorders.append(Recorder(sampler, data_dir, every_s=0.02))
        recorders[-1].start()
        until(lambda: len(rows(data_dir)) > 3)
        assert {row["host"] for row in rows(data_dir)} == {host}
        files.append(data_dir.gpu_db.name)
    assert [recorder.elected for recorder in recorders] == [True, True]
    assert files == ["gpu-gpu7.db", "gpu-gpu8_lab.db"]
    for recorder in recorders:
        recorder.stop(5)
        recorder._sampler.stop()


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_host_copies_its_rows_from_a_shared_history_file_to_its_own_file(
    data_dir: DataDir, record: Callable[..., Recorder], until: Until, is_shared: bool
) -> None:
    earlier = data_dir.root / "gpu.db"
    with closing(open_writer(earlier, "gpu")) as db:
        for host in (HOST, "other")[: 1 + is_shared]:
            db.execute(
                "INSERT INTO gpu_metrics VALUES(?, 0, ?, ?, 50, 1, 2, 40, 9.0, NULL, NULL)",
                (host, time.time() - 60, uuid_of(0)),
            )
            db.execute(history.ROLL_UP, (host, 0, 0.0, uuid_of(0)))
    record()
    until(lambda: len(rows(data_dir)) > 5)
    assert data_dir.gpu_db == (data_dir.own_gpu_db if is_shared else earlier)
    assert {row["host"] for row in rows(data_dir)} == {HOST}
    assert len(rows(data_dir, "SELECT * FROM gpu_metrics WHERE power_draw = 9.0")) == 1


def test_a_standby_recorder_switches_to_its_hosts_separate_history_file(
    data_dir: DataDir, record: Callable[..., Recorder], until: Until
) -> None:
    earlier = data_dir.root / "gpu.db"
    open_writer(earlier, "gpu").close()
    lock = FileLock(data_dir.locks / f"gpu-sampler-{data_dir.host_word}.lock")
    assert lock.acquire()
    recorder = record()
    # As if the elected process had switched to its own file and the user had then deleted the old one.
    open_writer(data_dir.own_gpu_db, "gpu").close()
    earlier.unlink()
    lock.release()
    until(lambda: recorder.elected and len(rows(data_dir)) > 3)
    assert not earlier.exists()


def test_one_recorder_is_elected_and_the_next_takes_over_when_it_stops(
    data_dir: DataDir, record: Callable[..., Recorder], until: Until
) -> None:
    first = record()
    until(lambda: first.elected)
    standby = Sampler(Simulated(2), 0.01)
    second = Recorder(standby, data_dir, host=HOST, every_s=0.02)
    second.start()
    before = len(rows(data_dir))
    until(lambda: len(rows(data_dir)) > before + 20)
    assert not second.elected
    assert standby.count == 0  # a standby process reads no GPU
    assert first.stop(5)
    until(lambda: second.elected)
    until(lambda: standby.count)
    assert second.stop(5)
    standby.stop()


RECORD = """
import itertools, sys, threading
from pathlib import Path
from sae_tui.gpu.history import Recorder
from sae_tui.gpu.sampler import Sampler
from sae_tui.gpu.simulated import Simulated
from trainer.contract.paths import DataDir
recorder = Recorder(Sampler(Simulated(2), 0.02), DataDir(Path(sys.argv[1])), host="box", every_s=0.05)
recorder.start()
print("started", flush=True)
while not recorder.elected:
    threading.Event().wait(0.01)
print("elected", flush=True)
threading.Event().wait()
"""


def test_a_paused_recorder_lets_another_take_over_and_stands_by_afterwards(
    data_dir: DataDir, sampler: Sampler, record: Callable[..., Recorder], until: Until
) -> None:
    first = record(every_s=0.02)
    until(lambda: first.elected and len(rows(data_dir)) > 4)
    assert first.pause(10)
    assert not first.elected
    other = FileLock(data_dir.locks / f"gpu-sampler-{data_dir.host_word}.lock")
    assert other.acquire()
    first.resume()
    assert first.pause(10)
    other.release()
    n_rows = len(rows(data_dir))
    first.resume()
    until(lambda: first.elected and len(rows(data_dir)) > n_rows)
    assert first.stop(10)
    assert first.pause(10)


def test_one_of_two_processes_records_and_the_other_takes_over_after_sigkill(
    data_dir: DataDir, tmp_path: Path, until: Until
) -> None:
    logs = [tmp_path / name for name in ("one.log", "two.log")]
    processes = [
        subprocess.Popen([sys.executable, "-c", RECORD, str(data_dir.root)], stdout=log.open("w")) for log in logs
    ]
    try:
        until(lambda: all("started" in log.read_text() for log in logs))
        until(lambda: any("elected" in log.read_text() for log in logs))
        until(lambda: len(rows(data_dir)) > 50)
        elected = [index for index, log in enumerate(logs) if "elected" in log.read_text()]
        assert len(elected) == 1
        holder, other = elected[0], 1 - elected[0]
        processes[holder].send_signal(signal.SIGKILL)
        processes[holder].wait()
        killed = time.time()
        until(lambda: "elected" in logs[other].read_text())
        newest = "SELECT max(timestamp) AS newest FROM gpu_metrics GROUP BY gpu_index"
        until(lambda: all(row["newest"] > killed + 0.2 for row in rows(data_dir, newest)))
        assert rows(data_dir, "PRAGMA integrity_check")[0][0] == "ok"
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: path.write_bytes(b"no database" * 1000), "is corrupt; `sae-tui repair`"),
        (lambda path: _set_version(path, 99), "made by a newer version"),
        (lambda path: path.mkdir(), "is not a plain file or has other hard links; remove it"),
    ],
)
def test_an_unwritable_store_is_reported_in_one_sentence_and_sampling_continues(
    data_dir: DataDir,
    record: Callable[..., Recorder],
    sampler: Sampler,
    until: Until,
    harm: Callable[[Path], Any],
    words: str,
) -> None:
    harm(data_dir.gpu_db)
    recorder = record()
    until(lambda: recorder.problem)
    assert words in (recorder.problem or "")
    assert str(data_dir.gpu_db) in (recorder.problem or "")
    n = len(sampler.ring(0))
    until(lambda: len(sampler.ring(0)) > n + 5)
    data_dir.gpu_db.rename(data_dir.gpu_db.with_suffix(".bad"))
    until(lambda: rows(data_dir))
    until(lambda: recorder.problem is None)
    assert rows(data_dir)[0]["timestamp"] == sampler.ring(0).column("timestamp")[0]  # no sample was lost


def test_a_store_locked_for_a_long_time_is_reported_and_written_afterwards(
    data_dir: DataDir, record: Callable[..., Recorder], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.contract.store.database.BUSY_TIMEOUT_S", 0.05)
    recorder = record()
    until(lambda: rows(data_dir))
    with closing(sqlite3.connect(data_dir.gpu_db, isolation_level=None, timeout=10)) as db:
        db.execute("BEGIN IMMEDIATE")
        until(lambda: recorder.problem)
        assert "locked by another process" in (recorder.problem or "")
        before = db.execute("SELECT count(*) FROM gpu_metrics").fetchone()[0]
        db.execute("COMMIT")
    until(lambda: len(rows(data_dir)) > before)
    until(lambda: recorder.problem is None)


def test_a_deleted_store_is_recreated_from_the_ring_buffers(
    data_dir: DataDir, record: Callable[..., Recorder], sampler: Sampler, until: Until
) -> None:
    recorder = record()
    until(lambda: rows(data_dir))
    for file in data_dir.root.glob("gpu-*.db*"):
        file.unlink()
    until(lambda: rows(data_dir))
    assert recorder.problem is None
    assert rows(data_dir)[0]["timestamp"] == sampler.ring(0).column("timestamp")[0]


def test_an_error_reading_the_jobs_is_reported(
    data_dir: DataDir, record: Callable[..., Recorder], until: Until
) -> None:
    def fail() -> dict[str, int]:
        raise StoreError("the store control.db is locked")

    recorder = record(jobs_by_uuid=fail)
    assert until(lambda: recorder.problem) == "the store control.db is locked"


def test_old_samples_are_deleted_and_per_minute_means_are_kept_longer(
    data_dir: DataDir, record: Callable[..., Recorder], until: Until
) -> None:
    now = time.time()
    store(data_dir, 5, [now - 40 * DAY, now - 2 * DAY, now - 3000.0])
    recorder = record(retention=Retention(raw_hours=24, minutes_days=30))
    until(lambda: [row["timestamp"] for row in rows(data_dir) if row["gpu_index"] == 5] == [now - 3000.0])
    minutes = [row["minute"] for row in rows(data_dir, "SELECT * FROM gpu_minutes WHERE gpu_index = 5")]
    assert minutes == [(now - 2 * DAY) // 60, (now - 3000) // 60]
    assert recorder.problem is None


def test_deleting_old_samples_uses_the_primary_key(data_dir: DataDir) -> None:
    store(data_dir, 0, [1.0])
    plans = rows(
        data_dir,
        "EXPLAIN QUERY PLAN DELETE FROM gpu_metrics WHERE host = 'box' AND gpu_index = 0 AND timestamp < 5",
    )
    assert [plan["detail"] for plan in plans] == [
        "SEARCH gpu_metrics USING PRIMARY KEY (host=? AND gpu_index=? AND timestamp<?)"
    ]


def test_the_history_continues_after_the_clock_is_set_back(data_dir: DataDir, until: Until) -> None:
    now = time.time()
    store(data_dir, 0, [now + 5000])
    sampler = Sampler(Simulated(1), 0.01)
    recorder = Recorder(sampler, data_dir, host=HOST, every_s=0.02)
    recorder.start()
    until(lambda: len([row for row in rows(data_dir) if row["timestamp"] < now + 1000]) > 10)
    assert recorder.stop(5)
    sampler.stop()


def test_recent_returns_the_stored_readings_for_each_gpu(data_dir: DataDir) -> None:
    now = time.time()
    store(data_dir, 0, [now - 900, now - 20, now - 19, now - 12, now - 11])
    store(data_dir, 3, [now - 1])
    samples = recent(data_dir.gpu_db, HOST, 600)
    assert set(samples) == {uuid_of(0), uuid_of(3)}
    assert [row.timestamp for row in samples[uuid_of(0)]] == [now - 20, now - 19, now - 12, now - 11]
    assert samples[uuid_of(0)][0] == RingReading(now - 20, 50, 1000, 40, 100.0, 2000)


def test_recent_is_empty_if_there_is_no_store_yet(data_dir: DataDir) -> None:
    assert recent(data_dir.gpu_db, HOST, 600) == {}


def test_recent_returns_only_rows_from_its_own_host(data_dir: DataDir) -> None:
    store(data_dir, 0, [time.time() - 5])
    assert recent(data_dir.gpu_db, "another", 600) == {}


def test_the_history_consists_of_samples_or_minute_means_where_samples_were_deleted(data_dir: DataDir) -> None:
    now = time.time()
    cut = (now - 3600) // 60 * 60
    store(data_dir, 0, [cut - 600, cut - 590, cut - 70, cut - 60], utilization=30, job=4)
    store(data_dir, 0, [cut + 1, cut + 2], utilization=90)
    store(data_dir, 1, [cut + 5])
    with closing(open_writer(data_dir.gpu_db, "gpu")) as db:
        db.execute("DELETE FROM gpu_metrics WHERE timestamp < ?", (cut,))
    points = list(stored_samples(data_dir.gpu_db, HOST, cut - 1800))
    assert [(row.gpu_index, row.timestamp, row.samples) for row in points] == [
        (0, cut - 600, 2), (0, cut - 120, 1), (0, cut - 60, 1), (0, cut + 1, 1), (0, cut + 2, 1), (1, cut + 5, 1),
    ]  # fmt: skip
    assert (points[0].utilization, points[0].job_id, points[0].memory_total_bytes) == (30, 4, 2000)
    assert points[3].utilization == 90
    assert [row.gpu_index for row in stored_samples(data_dir.gpu_db, HOST, cut - 1800, uuid=uuid_of(1))] == [1]
    assert list(stored_samples(data_dir.gpu_db, HOST, now - 10)) == []


def test_each_step_is_a_mean_over_samples_and_minutes_weighted_by_sample_counts(data_dir: DataDir) -> None:
    begin = (time.time() - 7200) // 3600 * 3600
    store(data_dir, 0, [begin, begin + 1, begin + 2], utilization=30)
    store(data_dir, 0, [begin + 60], utilization=90, power=None)
    store(data_dir, 0, [begin + 120], utilization=50)
    everything = list(stored_samples(data_dir.gpu_db, HOST, begin + 5, step_s=1800))
    with closing(open_writer(data_dir.gpu_db, "gpu")) as db:
        db.execute("DELETE FROM gpu_metrics WHERE timestamp < ?", (begin + 60,))
    (point,) = list(stored_samples(data_dir.gpu_db, HOST, begin + 5, step_s=1800))
    assert [point] == everything
    assert (point.timestamp, point.samples, point.utilization, point.power_w) == (begin, 5, 46, 100)
    short = list(stored_samples(data_dir.gpu_db, HOST, begin, step_s=2))
    assert [(row.timestamp - begin, row.samples, row.utilization) for row in short] == [
        (0, 3, 30), (60, 1, 90), (120, 1, 50),
    ]  # fmt: skip


def test_a_gpus_history_continues_when_its_index_changes(data_dir: DataDir) -> None:
    begin = time.time() // 60 * 60 - 3600
    store(data_dir, 0, [begin, begin + 1], uuid="GPU-moved", utilization=10)
    store(data_dir, 1, [begin + 2, begin + 3], uuid="GPU-moved", utilization=20)
    store(data_dir, 0, [begin + 60, begin + 61], uuid="GPU-other", utilization=90)
    points = list(stored_samples(data_dir.gpu_db, HOST, begin, uuid="GPU-moved"))
    assert [(row.gpu_index, row.timestamp - begin) for row in points] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    (step,) = stored_samples(data_dir.gpu_db, HOST, begin, uuid="GPU-moved", step_s=20)
    assert (step.samples, step.utilization) == (4, 15)
    assert [row.utilization for row in recent(data_dir.gpu_db, HOST, 4000)["GPU-moved"]][:4] == [10, 10, 20, 20]


def test_totals_state_how_many_gpus_they_count(data_dir: DataDir) -> None:
    begin = time.time() // 60 * 60 - 3600
    store(data_dir, 0, [begin, begin + 5], utilization=10)
    store(data_dir, 1, [begin + 1], utilization=20, power=None)
    store(data_dir, 2, [begin + 1], utilization=None, memory=None, temperature=70)
    both, one = totals(stored_samples(data_dir.gpu_db, HOST, begin, step_s=5))
    assert both == GpuTotals(
        timestamp=begin, gpus_counted=3, total_memory_used_bytes=2000, total_memory_total_bytes=4000,
        average_utilization=15, max_temperature_c=70, total_power_w=200.0,
    )  # fmt: skip
    assert one == GpuTotals(
        timestamp=begin + 5, gpus_counted=1, total_memory_used_bytes=1000, total_memory_total_bytes=2000,
        average_utilization=10, max_temperature_c=40, total_power_w=100.0,
    )  # fmt: skip


def test_a_missing_history_store_is_reported(data_dir: DataDir) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        list(stored_samples(data_dir.gpu_db, HOST, 10))


def filled(data_dir: DataDir, hours: float) -> None:
    """Store one GPU sample per second of the last `hours` hours."""
    store(data_dir, 0, [time.time() - hours * 3600 + second for second in range(int(hours * 3600))])


def kept_up(data_dir: DataDir, upkeep: Upkeep, db: sqlite3.Connection) -> list[int]:
    """Run two complete maintenance passes a minute apart, and return the sizes of the write-ahead log."""
    wal = data_dir.gpu_db.with_name(f"{data_dir.gpu_db.name}-wal")
    sizes = []
    for now in (time.time(), time.time() + 60):
        upkeep.turn(db, now)
        while upkeep.busy:
            upkeep.turn(db, now)
            sizes.append(wal.stat().st_size)
    return sizes


def test_the_history_file_shrinks_after_a_shorter_retention_is_set(
    data_dir: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "BATCH_ROWS", 1000)
    monkeypatch.setattr(upkeep, "TURN_S", 0.0)
    monkeypatch.setattr(upkeep, "SLACK_PAGES", 10)
    monkeypatch.setattr(upkeep, "BATCH_PAGES", 10)
    filled(data_dir, 8)
    with closing(open_writer(data_dir.gpu_db, "gpu")) as db:
        db.execute("PRAGMA wal_autocheckpoint=20")  # instead of 1000 pages, since this file is small
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        before = data_dir.gpu_db.stat().st_size
        sizes = kept_up(data_dir, Upkeep(data_dir.gpu_db, HOST, Retention(raw_hours=1)), db)
        assert len(sizes) > 20  # rows were deleted in small batches, so that samples could be stored in between
        assert max(sizes) < before / 2
        assert sizes[-1] == 0
        assert data_dir.gpu_db.stat().st_size < before / 3
        assert 3400 <= db.execute("SELECT count(*) FROM gpu_metrics").fetchone()[0] <= 3660
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    minutes = rows(data_dir, "SELECT * FROM gpu_minutes")
    assert len(minutes) >= 8 * 60


@pytest.mark.parametrize(("space", "shrinks"), [(1 << 40, True), (1 << 20, False)], ids=["space", "no space"])
def test_an_earlier_versions_history_file_is_rebuilt_once_if_the_disk_has_space(
    data_dir: DataDir, monkeypatch: pytest.MonkeyPatch, space: int, shrinks: bool
) -> None:
    monkeypatch.setattr(upkeep.shutil, "disk_usage", lambda path: SimpleNamespace(free=space))
    filled(data_dir, 3)
    with closing(sqlite3.connect(data_dir.gpu_db, isolation_level=None)) as db:  # as the earlier version did
        db.execute("PRAGMA journal_mode=delete")
        db.execute("PRAGMA auto_vacuum=NONE")
        db.execute("VACUUM")
    before = data_dir.gpu_db.stat().st_size
    with closing(open_writer(data_dir.gpu_db, "gpu")) as db:
        kept_up(data_dir, Upkeep(data_dir.gpu_db, HOST, Retention(raw_hours=1)), db)
        assert (db.execute("PRAGMA auto_vacuum").fetchone()[0] == 2) is shrinks
        assert (data_dir.gpu_db.stat().st_size < 0.6 * before) is shrinks
        assert 3400 <= db.execute("SELECT count(*) FROM gpu_metrics").fetchone()[0] <= 3660


def test_a_hung_disk_and_unexpected_errors_are_reported_and_recording_continues(
    data_dir: DataDir, record: Callable[..., Recorder], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "SILENT_AFTER_S", 0.05)
    open_store, continues = history.open_writer, threading.Event()
    stage = ["fails"]

    def open_badly(*arguments: Any) -> sqlite3.Connection:
        if stage[0] == "fails":
            raise ZeroDivisionError
        continues.wait(60)
        return open_store(*arguments)

    monkeypatch.setattr(history, "open_writer", open_badly)
    recorder = record()
    until(lambda: "ZeroDivisionError" in (recorder.problem or ""))
    stage[0] = "hangs"
    until(lambda: "does not respond" in (recorder.problem or ""))
    continues.set()
    until(lambda: recorder.problem is None)
    until(lambda: rows(data_dir))


@pytest.mark.parametrize("ahead", [8 * 3600, 3 * DAY, 400 * DAY])
@pytest.mark.parametrize("before", ["this process began", "it jumped"])
def test_a_forward_clock_jump_deletes_nothing_and_recording_continues_after_it(
    data_dir: DataDir, ahead: float, before: str
) -> None:
    now = time.time()
    store(data_dir, 0, [now - second for second in range(23 * 3600, 0, -60)])
    kept = rows(data_dir), rows(data_dir, "SELECT * FROM gpu_minutes")
    with closing(open_writer(data_dir.gpu_db, "gpu")) as db:
        keeper = Upkeep(data_dir.gpu_db, HOST, Retention())
        if before == "it jumped":
            turn_whole(keeper, db, now)
        for minute in range(10):
            turn_whole(keeper, db, now + ahead + 60 * minute)
        assert (rows(data_dir), rows(data_dir, "SELECT * FROM gpu_minutes")) == kept
        turn_whole(keeper, db, now + 1)
        assert len(rows(data_dir)) == len(kept[0])


def test_a_machine_switched_off_for_a_month_deletes_old_rows_after_half_an_hour(data_dir: DataDir) -> None:
    now = time.time()
    store(data_dir, 0, [now - 35 * DAY - 60 * minute for minute in range(30)])
    with closing(open_writer(data_dir.gpu_db, "gpu")) as db:
        turn_whole(Upkeep(data_dir.gpu_db, HOST, Retention()), db, now)
        assert len(rows(data_dir)) == 30
        store(data_dir, 0, [now - 60 * minute for minute in range(40)])
        turn_whole(Upkeep(data_dir.gpu_db, HOST, Retention()), db, now)
    assert len(rows(data_dir)) == 40


def turn_whole(keeper: Upkeep, db: sqlite3.Connection, now: float) -> None:
    keeper.turn(db, now)
    while keeper.busy:
        keeper.turn(db, now)


def test_a_new_history_file_can_shrink(data_dir: DataDir) -> None:
    with closing(open_writer(data_dir.gpu_db, "gpu")) as db:
        assert db.execute("PRAGMA auto_vacuum").fetchone()[0] == 2


def test_stored_readings_from_another_gpu_are_not_stored_again_for_this_gpu(data_dir: DataDir, until: Until) -> None:
    now = time.time()
    store(data_dir, 0, [now - 3, now - 2], uuid="GPU-other")
    store(data_dir, 5, [now - 3, now - 2])
    with closing(open_writer(data_dir.gpu_db, "gpu")) as db:
        db.execute("UPDATE gpu_metrics SET gpu_uuid = ? WHERE gpu_index = 5", (uuid_of(0),))
    sampler = Sampler(Simulated(1), 0.01)
    recorder = Recorder(sampler, data_dir, host=HOST, every_s=0.02)
    sampler.ring(0).extend_history([RingReading(now - 3, 50), RingReading(now - 2, 50)], uuid_of(0))
    recorder.start()
    until(lambda: len([row for row in rows(data_dir) if row["gpu_uuid"] == uuid_of(0)]) > 20)
    assert recorder.stop(5)
    sampler.stop()
    assert [row["gpu_index"] for row in rows(data_dir) if row["timestamp"] < now] == [0, 0, 5, 5]
    assert {row["gpu_uuid"] for row in rows(data_dir, "SELECT * FROM gpu_minutes WHERE gpu_index = 0")} >= {uuid_of(0)}


class Nameless(Simulated):
    """A GPU that does not report its UUID in the first few readings."""

    known = False

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        sample = super().sample(index, processes=processes)
        return sample if self.known else replace(sample, uuid="GPU-index-0", failed={"uuid": "unknown"})


def test_readings_are_stored_only_once_the_gpu_has_reported_its_uuid(data_dir: DataDir, until: Until) -> None:
    source = Nameless(1)
    sampler = Sampler(source, 0.01)
    recorder = Recorder(sampler, data_dir, host=HOST, every_s=0.02)
    recorder.start()
    until(lambda: len(sampler.ring(0)) > 20)
    assert rows(data_dir) == []
    source.known = True
    until(lambda: len(rows(data_dir)) > 20)
    assert recorder.stop(5)
    sampler.stop()
    assert {row["gpu_uuid"] for row in rows(data_dir)} == {uuid_of(0)}
    assert rows(data_dir)[0]["timestamp"] == sampler.ring(0).column("timestamp")[0]


@pytest.fixture
def monitor(data_dir: DataDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Monitor]]:
    """Return a function that starts monitors for this host's GPUs; they are stopped after the test."""
    monkeypatch.setattr("socket.gethostname", lambda: HOST)
    started: list[Monitor] = []

    def begin(source: Simulated) -> Monitor:
        started.append(Monitor(source, data_dir, dict))
        started[-1].start()
        return started[-1]

    yield begin
    for each in started:
        each.stop()


def test_only_history_from_the_same_gpu_is_shown(
    data_dir: DataDir, monitor: Callable[..., Monitor], until: Until
) -> None:
    begin = time.time() - 60
    store(data_dir, 0, [begin + second for second in range(50)], uuid="GPU-other", utilization=77)
    store(data_dir, 4, [begin + second for second in range(50)], uuid=uuid_of(1), utilization=33)
    started = monitor(Simulated(2))
    until(lambda: utilization(started, 1).count(33) >= 50)
    assert 77 not in utilization(started, 0)


def utilization(monitor: Monitor, index: int) -> list[float | None]:
    """Return a GPU's utilisation over the last ten minutes, or [] while the GPUs are not known yet."""
    return monitor.past(600).column(index, "utilization", 600) if monitor.latest() else []


def test_readings_stored_later_by_another_process_close_the_gap(
    data_dir: DataDir, monitor: Callable[..., Monitor], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sae_tui.gpu.monitor.STORED_BY_S", 1.0)
    begin = time.time() - 30
    store(data_dir, 0, [begin + second for second in range(20)], utilization=11)
    started = monitor(Simulated(1))
    until(lambda: utilization(started, 0)[-5:-1].count(None) > 1)  # a ten-second gap not recorded by any process
    store(data_dir, 0, [begin + second for second in range(20, 29)], utilization=11)
    until(lambda: utilization(started, 0).count(11) >= 29)
    recorded = utilization(started, 0)
    assert None not in recorded[recorded.index(11) :]


def _set_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version={version}")


def test_setting_the_clock_back_while_recording_loses_no_reading(data_dir: DataDir, until: Until) -> None:
    class Turned(Simulated):
        offset_s = 0.0

        def sample(self, index: int, *, processes: bool) -> GpuSample:
            sample = super().sample(index, processes=processes)
            return replace(sample, timestamp=sample.timestamp + self.offset_s)

    source = Turned(1)
    sampler = Sampler(source, 0.02, capacity=100_000)
    recorder = Recorder(sampler, data_dir, host=HOST, every_s=0.05)
    recorder.start()
    until(lambda: len(rows(data_dir)) > 5)
    turned = time.time() - 1800.0
    source.offset_s = -3600.0
    until(lambda: len([row for row in rows(data_dir) if row["timestamp"] < turned]) > 10)
    assert sampler.stop(5)
    assert recorder.stop(5)
    stored = [row["timestamp"] for row in rows(data_dir)]
    in_ring = sampler.ring(0).column("timestamp")
    assert sorted(stored) == sorted(in_ring)
