from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.contract.files import write_own
from trainer.contract.store.metrics_store import Heartbeat, MetricRow
from trainer.contract.store.progress_line import ProgressLine, decode
from trainer.reporting.jsonl_file import FileRequests, LineFile
from trainer.reporting.progress import StoredProgress


@contextlib.contextmanager
def reporting(folder: Path, **options: object) -> Iterator[StoredProgress]:
    stop = options.pop("stop", threading.Event())
    file = LineFile(folder / "progress.jsonl", **options)
    progress = StoredProgress(file, 100, stop, FileRequests(folder / "stop", folder / "finish"))
    try:
        yield progress
    finally:
        progress.close()


def lines(folder: Path) -> list[ProgressLine | None]:
    return [decode(text) for text in (folder / "progress.jsonl").read_bytes().splitlines()]


def test_reported_data_is_in_the_file_after_closing(tmp_path: Path) -> None:
    with reporting(tmp_path) as progress:
        progress.rows([MetricRow("loss", 10, math.inf), MetricRow("step_ms", 10, 3.0, rank=1)])
        progress.event("checkpoint", "saved")
        progress.heartbeat("training", 10, 400)
    (line,) = lines(tmp_path)
    assert line is not None
    assert line.rows == (("loss", 10, None, 0), ("step_ms", 10, 3.0, 1))
    assert [event.message for event in line.events] == ["saved"]
    assert line.heartbeat is not None
    assert (line.heartbeat.phase, line.heartbeat.step, line.heartbeat.total_steps) == ("training", 10, 100)
    assert (tmp_path / "progress.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_resumed_run_writes_its_start_position_first(tmp_path: Path) -> None:
    at = Heartbeat("resuming", 5, 100, 200, 0.0)
    with reporting(tmp_path, rewind=at):
        pass
    with reporting(tmp_path):
        pass
    assert lines(tmp_path) == [ProgressLine(rewind=at)]


def test_data_for_a_missing_folder_is_written_once_the_folder_exists(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    folder = tmp_path / "run"
    with reporting(folder) as progress:
        progress.rows([MetricRow("loss", 1, 1.0)])
        eventually(lambda: progress._outage)
        folder.mkdir()
        progress.rows([MetricRow("loss", 2, 2.0)])
        progress.heartbeat("training", 2, 80)
    whole_lines = [line for line in lines(folder) if line is not None]
    assert [row for line in whole_lines for row in line.rows] == [("loss", 1, 1.0, 0), ("loss", 2, 2.0, 0)]
    assert whole_lines[-1].heartbeat is not None
    assert whole_lines[-1].heartbeat.dropped == 0


def test_a_truncated_line_is_terminated_before_the_next_line(tmp_path: Path) -> None:
    with reporting(tmp_path) as progress:
        (tmp_path / "progress.jsonl").write_bytes(b'{"rows":[["lo')
        progress._store._cut = True
        progress.rows([MetricRow("loss", 2, 2.0)])
    cut, whole = lines(tmp_path)
    assert cut is None
    assert whole is not None
    assert whole.rows == (("loss", 2, 2.0, 0),)


def test_a_stop_file_requests_a_stop(tmp_path: Path, eventually: Callable[..., None]) -> None:
    stop = threading.Event()
    with reporting(tmp_path, stop=stop):
        assert not stop.is_set()
        (tmp_path / "stop").touch()
        eventually(stop.is_set)


def test_a_stop_file_that_is_written_again_requests_another_stop(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    stop = threading.Event()
    with reporting(tmp_path, stop=stop) as progress:
        write_own(tmp_path / "stop", "")
        eventually(stop.is_set)
        stop.clear()
        progress.settle()
        assert not stop.is_set()
        write_own(tmp_path / "stop", "")
        eventually(stop.is_set)
