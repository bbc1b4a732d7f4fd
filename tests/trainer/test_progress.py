from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.contract.control import Control, Job
from trainer.contract.series import Row, SeriesReader
from trainer.progress import Requests, StoredProgress


@contextlib.contextmanager
def reporting(path: Path, **options: object) -> Iterator[StoredProgress]:
    progress = StoredProgress(path, 100, threading.Event(), None)
    try:
        yield progress
    finally:
        progress.close()


def read(path: Path) -> SeriesReader:
    return SeriesReader(path)


def test_what_is_handed_over_is_in_the_store_when_it_is_closed(tmp_path: Path) -> None:
    with reporting(tmp_path / "metrics.db") as progress:
        progress.rows([Row("loss", 10, 0.5), Row("step_ms", 10, 3.0, rank=1)])
        progress.event("checkpoint", "saved")
        progress.beat("training", 10, 400)
    with contextlib.closing(read(tmp_path / "metrics.db")) as reader:
        assert reader.latest() == {"loss": 0.5}
        assert reader.latest(rank=1) == {"step_ms": 3.0}
        assert [event.kind for event in reader.events()] == ["checkpoint"]
        heartbeat = reader.heartbeat()
        assert heartbeat is not None
        assert (heartbeat.phase, heartbeat.step, heartbeat.total_steps, heartbeat.tokens) == ("training", 10, 100, 400)


def test_a_heartbeat_is_the_time_of_the_last_step_and_not_of_the_writing(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    path = tmp_path / "metrics.db"
    with reporting(path) as progress:
        progress.beat("training", 1, 40)
        eventually(path.exists)
        progress.rows([Row("loss", 1, 0.5)])
    with contextlib.closing(read(path)) as reader:
        heartbeat = reader.heartbeat()
    progress_time = progress._heartbeat.timestamp
    assert heartbeat is not None
    assert heartbeat.timestamp == progress_time


def test_a_locked_store_costs_rows_and_not_the_run(tmp_path: Path, eventually: Callable[..., None]) -> None:
    path = tmp_path / "metrics.db"
    with reporting(path) as progress:
        progress.rows([Row("loss", 1, 1.0)])
        eventually(lambda: latest(path).get("loss") == 1.0)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            progress.rows([Row("loss", 2, 2.0)])
            eventually(lambda: progress._dropped == 1)
            other.execute("ROLLBACK")
        progress.beat("training", 3, 120)
        progress.rows([Row("loss", 3, 3.0)])
        eventually(lambda: latest(path).get("loss") == 3.0)
    with contextlib.closing(read(path)) as reader:
        assert [point.step for point in reader.points("loss")] == [1, 3]
        heartbeat = reader.heartbeat()
        assert heartbeat is not None
        assert heartbeat.dropped == 1


def test_a_store_whose_folder_is_missing_costs_rows_until_it_is_there(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    path = tmp_path / "run" / "metrics.db"
    with reporting(path) as progress:
        progress.rows([Row("loss", 1, 1.0)])
        eventually(lambda: progress._dropped == 1)
        path.parent.mkdir()
        progress.rows([Row("loss", 2, 2.0)])
        eventually(lambda: latest(path).get("loss") == 2.0)


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


def test_a_stop_request_sets_the_flag_and_a_request_to_another_job_does_not(
    tmp_path: Path, control: Control, eventually: Callable[..., None]
) -> None:
    job = Job(name="a", config="", user="u", host="h", device="cpu", gpu_source="none")
    mine, other = control.create_job(job), control.create_job(job)
    stop = threading.Event()
    requests = Requests(control.path, mine)
    progress = StoredProgress(tmp_path / "metrics.db", 100, stop, requests)
    with contextlib.closing(progress):
        control.request(other, "stop")
        assert not requests.stop_wanted()
        control.request(mine, "stop")
        eventually(stop.is_set, 5)


def test_a_control_store_that_cannot_be_read_asks_for_nothing(tmp_path: Path, control: Control) -> None:
    requests = Requests(tmp_path / "later.db", 1)
    assert not requests.stop_wanted()
    assert not (tmp_path / "later.db").exists()
