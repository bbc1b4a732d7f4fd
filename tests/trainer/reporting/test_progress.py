from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import MetricRow, SeriesReader
from trainer.contract.store.rows import Job
from trainer.reporting.progress import Requests, StoredProgress


@contextlib.contextmanager
def reporting(path: Path, **options: object) -> Iterator[StoredProgress]:
    progress = StoredProgress(path, 100, threading.Event(), None, **options)
    try:
        yield progress
    finally:
        progress.close()


def read(path: Path) -> SeriesReader:
    return SeriesReader(path)


def test_reported_data_is_in_the_store_after_closing(tmp_path: Path) -> None:
    with reporting(tmp_path / "metrics.db") as progress:
        progress.rows([MetricRow("loss", 10, 0.5), MetricRow("step_ms", 10, 3.0, rank=1)])
        progress.event("checkpoint", "saved")
        progress.heartbeat("training", 10, 400)
    with contextlib.closing(read(tmp_path / "metrics.db")) as reader:
        assert reader.latest() == {"loss": 0.5}
        assert reader.latest(rank=1) == {"step_ms": 3.0}
        assert [event.kind for event in reader.events()] == ["checkpoint"]
        heartbeat = reader.heartbeat()
        assert heartbeat is not None
        assert (heartbeat.phase, heartbeat.step, heartbeat.total_steps, heartbeat.tokens) == ("training", 10, 100, 400)


def test_a_heartbeat_carries_the_time_of_the_last_step_rather_than_of_the_disk_write(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    path = tmp_path / "metrics.db"
    with reporting(path) as progress:
        progress.heartbeat("training", 1, 40)
        eventually(path.exists)
        progress.rows([MetricRow("loss", 1, 0.5)])
    with contextlib.closing(read(path)) as reader:
        heartbeat = reader.heartbeat()
    progress_time = progress._heartbeat.timestamp
    assert heartbeat is not None
    assert heartbeat.timestamp == progress_time


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a lock for at most 50 ms, and retry every 50 ms."""
    monkeypatch.setattr("trainer.contract.store.database.BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr("trainer.reporting.progress.RETRY_S", 0.05)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def events(path: Path) -> list[str]:
    with contextlib.closing(read(path)) as reader:
        return [event.message for event in reader.events() if event.kind == "store"]


def test_data_reported_while_the_store_is_locked_is_written_later(
    tmp_path: Path, impatient: None, eventually: Callable[..., None]
) -> None:
    path = tmp_path / "metrics.db"
    with reporting(path) as progress:
        progress.rows([MetricRow("loss", 1, 1.0)])
        eventually(lambda: latest(path).get("loss") == 1.0)
        with locked(path):
            progress.rows([MetricRow("loss", 2, 2.0)])
            progress.event("checkpoint", "saved")
            eventually(lambda: progress._outage)
        progress.heartbeat("training", 3, 120)
        progress.rows([MetricRow("loss", 3, 3.0)])
        eventually(lambda: latest(path).get("loss") == 3.0)
    with contextlib.closing(read(path)) as reader:
        assert [point.step for point in reader.points("loss")] == [1, 2, 3]
        assert [event.kind for event in reader.events()] == ["checkpoint", "store"]
        assert reader.heartbeat().dropped == 0
    (text,) = events(path)
    assert re.match(
        r"metrics could not be stored for \d+ s; no rows were lost \(the store .* has been locked by another process",
        text,
    )


def test_each_step_touches_a_file_even_while_rows_cannot_be_stored(
    tmp_path: Path, impatient: None, eventually: Callable[..., None]
) -> None:
    path, sign = tmp_path / "metrics.db", tmp_path / "ranks.json"
    sign.touch()
    os.utime(sign, (1, 1))
    with reporting(path, sign=sign) as progress:
        progress.heartbeat("training", 1, 40)
        eventually(path.exists)
        with locked(path):
            progress.heartbeat("training", 2, 80)
            eventually(lambda: sign.stat().st_mtime > 1)
            os.utime(sign, (1, 1))
            eventually(lambda: progress._outage)
            tries = progress._outage.retry_at
            eventually(lambda: progress._outage.retry_at > tries)
            assert sign.stat().st_mtime == 1  # no step has been taken in the meantime
            progress.heartbeat("training", 3, 120)
            eventually(lambda: sign.stat().st_mtime > 1)


def test_the_oldest_rows_beyond_the_capacity_are_dropped_and_counted(
    tmp_path: Path, impatient: None, eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.reporting.progress.MOST_ROWS", 100)
    monkeypatch.setattr("trainer.reporting.progress.ROWS_AT_ONCE", 30)
    path = tmp_path / "metrics.db"
    with reporting(path) as progress:
        progress.rows([MetricRow("loss", 1, 1.0)])
        eventually(lambda: latest(path).get("loss") == 1.0)
        with locked(path):
            for step in range(2, 252):
                progress.rows([MetricRow("loss", step, 0.0)])
            eventually(lambda: progress._outage)
        progress.heartbeat("training", 251, 251)
        eventually(lambda: events(path))
    with contextlib.closing(read(path)) as reader:
        assert [point.step for point in reader.points("loss")] == [1, *range(152, 252)]
        assert reader.heartbeat().dropped == 150
    assert "150 rows were lost" in events(path)[0]


def test_rows_are_kept_until_the_missing_folder_is_created(
    tmp_path: Path, impatient: None, eventually: Callable[..., None]
) -> None:
    path = tmp_path / "run" / "metrics.db"
    with reporting(path) as progress:
        progress.rows([MetricRow("loss", 1, 1.0)])
        eventually(lambda: progress._outage)
        path.parent.mkdir()
        progress.rows([MetricRow("loss", 2, 2.0)])
        eventually(lambda: latest(path).get("loss") == 2.0)
    with contextlib.closing(read(path)) as reader:
        assert [point.step for point in reader.points("loss")] == [1, 2]


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path.with_name("other.db"))) as other, other:
        other.execute("CREATE TABLE notes(text)")
    path.with_name("other.db").rename(path)


def checkpoint(path: Path) -> None:
    """Move a store's content from its write-ahead log into its file.

    Otherwise, a small store would exist only in the log, which this test does not damage.
    """
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def overwrite(path: Path) -> None:
    checkpoint(path)
    path.write_bytes(b"garbage " * 10_000)


def cut_off(path: Path) -> None:
    checkpoint(path)
    os.truncate(path, 0)


@pytest.mark.parametrize(
    ("spoil", "told", "kept"),
    [
        (delete, "metrics.db was deleted; ", None),
        (replace, "metrics.db was replaced and is kept as metrics.db.replaced-1; ", "metrics.db.replaced-1"),
        (overwrite, "metrics.db was damaged and is kept as metrics.db.corrupt-1; ", "metrics.db.corrupt-1"),
        (cut_off, "metrics.db was damaged and is kept as metrics.db.corrupt-1; ", "metrics.db.corrupt-1"),
    ],
)
def test_a_store_lost_during_a_run_is_recreated_and_the_loss_is_reported(
    spoil: Callable[[Path], None], told: str, kept: str | None, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    path = tmp_path / "metrics.db"
    with reporting(path) as progress:
        progress.heartbeat("training", 7, 280)
        progress.rows([MetricRow("loss", 7, 1.0)])
        eventually(lambda: latest(path).get("loss") == 1.0)
        # The app has the store open at the same time.
        with contextlib.closing(read(path)) as reader:
            assert reader.latest() == {"loss": 1.0}
            spoil(path)
            progress.rows([MetricRow("fvu", 8, 2.0)])
            eventually(lambda: latest(path).get("fvu") == 2.0)
        progress.rows([MetricRow("fvu", 9, 3.0)])
    assert latest(path) == {"fvu": 3.0}
    assert events(path) == [f"{told}a new file was created, without the curves and events up to step 7"]
    with contextlib.closing(read(path)) as reader:
        assert reader.heartbeat().step == 7
    assert {file.name for file in tmp_path.iterdir()} >= {kept or "metrics.db"}
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def latest(path: Path) -> dict[str, float]:
    try:
        with contextlib.closing(read(path)) as reader:
            return reader.latest()
    except Exception:
        return {}


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    with contextlib.closing(Control(tmp_path / "control.db")) as control:
        yield control


def test_a_stop_request_sets_the_flag_but_a_request_for_another_job_does_not(
    tmp_path: Path, control: Control, eventually: Callable[..., None]
) -> None:
    job = Job(name="a", config="", user="u", host="h", device="cpu", gpu_source="none")
    mine, other = control.create_job(job), control.create_job(job)
    stop = threading.Event()
    requests = Requests(control.path, mine)
    progress = StoredProgress(tmp_path / "metrics.db", 100, stop, requests)
    with contextlib.closing(progress):
        control.request(other, "stop")
        assert not requests.wanted().stop
        control.request(mine, "stop")
        eventually(stop.is_set, 5)
        # Each request sets the flag only once.
        stop.clear()
        progress.settle()
        assert not stop.is_set()
        control.request(mine, "kill")
        eventually(stop.is_set, 5)


def test_an_unreadable_control_store_yields_no_request(tmp_path: Path, control: Control) -> None:
    requests = Requests(tmp_path / "later.db", 1)
    assert not requests.wanted().stop
    assert not (tmp_path / "later.db").exists()


def test_data_reported_before_a_save_is_in_the_store_when_the_save_starts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("trainer.reporting.progress.FLUSH_S", 60.0)
    with reporting(tmp_path / "metrics.db") as progress:
        for step in range(1, 4):
            progress.rows([MetricRow("loss", step, 1.0)])
            progress.settle()
            with contextlib.closing(read(tmp_path / "metrics.db")) as reader:
                assert [point.step for point in reader.points("loss")] == list(range(1, step + 1))
