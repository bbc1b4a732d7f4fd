"""Tests that values are read from TensorBoard, W&B and Trackio files, even if the files are incomplete or damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.metrics_files import add_trackio, event, field, record, wandb_file

from sae_tui.jobs.program_metrics import folders as metrics_folders
from sae_tui.jobs.program_metrics.event_files import read_events
from sae_tui.jobs.program_metrics.folders import FRUITLESS, MetricsFolders
from sae_tui.jobs.program_metrics.sources import LARGEST_RECORD, FilePosition, FileValues, MetricsFile
from sae_tui.jobs.program_metrics.trackio_files import read_trackio
from sae_tui.jobs.program_metrics.wandb_files import read_wandb

STEPS = [(step, {"loss": 1 / (step + 1), "eval/acc": step / 4}) for step in range(12)]
EVENTS = b"".join(event(step, values, as_tensor=bool(step % 2)) for step, values in STEPS)
FILES: dict[str, tuple[MetricsFile, bytes]] = {
    "events": (read_events, EVENTS),
    "wandb": (read_wandb, wandb_file(STEPS)),
    "wandb in blocks": (read_wandb, wandb_file(STEPS, padding=20_000)),
}


def read_all(reader: MetricsFile, path: Path, position: FilePosition) -> list[FileValues]:
    return [values for _ in range(3) for values in reader(path, position)]


def as_steps(found: list[FileValues]) -> list[tuple[int, dict[str, float]]]:
    return [(one.step, {name: round(value, 6) for name, value in one.values.items()}) for one in found]


ROUNDED = as_steps([FileValues(step, values) for step, values in STEPS])


@pytest.mark.parametrize("name", FILES)
def test_all_values_are_read(name: str, tmp_path: Path) -> None:
    reader, content = FILES[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    assert as_steps(read_all(reader, path, FilePosition())) == ROUNDED


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_being_written_yields_each_value_once(name: str, tmp_path: Path) -> None:
    reader, content = FILES[name]
    path, position, found = tmp_path / "file", FilePosition(), list[FileValues]()
    path.touch()
    for begin in range(0, len(content), max(7, len(content) // 97)):
        with path.open("ab") as stream:
            stream.write(content[begin : begin + max(7, len(content) // 97)])
        found += reader(path, position)
    assert as_steps(found) == ROUNDED
    assert not position.is_damaged


@settings(max_examples=60)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_damage_may_lose_values_but_never_causes_an_error(name: str, data: st.DataObject) -> None:
    reader, content = FILES[name]
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=12))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(damaged)
        found = read_all(reader, path, FilePosition())
        assert len(found) <= 2 * len(STEPS)


def test_a_wrong_length_marks_an_event_file_as_damaged_but_a_large_record_is_skipped(tmp_path: Path) -> None:
    path, position = tmp_path / "events", FilePosition()
    large = record(field(5, b"x" * (LARGEST_RECORD + 1)))
    path.write_bytes(event(1, {"a": 1}) + large + event(2, {"a": 2}))
    assert [one.step for one in read_all(read_events, path, position)] == [1, 2]
    with path.open("ab") as stream:
        stream.write(b"\0" * 100)
    assert read_all(read_events, path, position) == []
    assert position.is_damaged


def test_only_rows_added_to_a_trackio_database_since_the_start_are_read(tmp_path: Path) -> None:
    path, position = tmp_path / "p.db", FilePosition(since=1_700_000_000)
    path.touch()
    assert list(read_trackio(path, position)) == []
    add_trackio(path, [("2020-01-01T00:00:00", "old", 1, {"a": 1}), ("2030-01-01T00:00:00", "r", 2, {"a": 2})])
    assert list(read_trackio(path, position)) == [FileValues(2, {"a": 2.0}, "r")]
    add_trackio(path, [("2030-01-01T00:00:00+00:00", "r", 3, {"a": 3}), ("not a time", "r", 4, {"a": 4})])
    assert list(read_trackio(path, position)) == [FileValues(3, {"a": 3.0}, "r")]
    assert list(read_trackio(path, position)) == []


ENDLESS = """
CREATE VIEW metrics AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n)
SELECT id, '2030-01-01' AS timestamp, '' AS run_name, id AS step, '{}' AS metrics FROM n
"""


@pytest.mark.parametrize("statement", ["CREATE TABLE metrics(id)", "CREATE TABLE other(id)", ENDLESS])
def test_a_database_that_does_not_come_from_trackio_is_ignored(statement: str, tmp_path: Path) -> None:
    import sqlite3

    path, position = tmp_path / "other.db", FilePosition()
    with sqlite3.connect(path) as db:
        db.execute(statement)
    assert list(read_trackio(path, position)) == []
    assert position.is_damaged


def folders(
    tmp_path: Path, since: float = 0.0, pids: Callable[[], list[int]] = lambda: [os.getpid()]
) -> MetricsFolders:
    return MetricsFolders([tmp_path / "work", tmp_path / "run"], tmp_path / "work/data", since, {}, pids)


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_files_below_the_folders_are_found_and_read_once(tmp_path: Path) -> None:
    write(tmp_path / "work/runs/a/events.out.tfevents.1.host.2.0", event(1, {"a": 1}))
    write(tmp_path / "run/wandb/offline-run-1/run-1.wandb", wandb_file([(2, {"b": 2})]))
    found = folders(tmp_path)
    assert {path.name: values.step for path, values in found.read()} == {
        "events.out.tfevents.1.host.2.0": 1, "run-1.wandb": 2,
    }  # fmt: skip
    assert list(found.read(is_last=True)) == []
    with (tmp_path / "work/runs/a/events.out.tfevents.1.host.2.0").open("ab") as stream:
        stream.write(event(3, {"a": 1}))
    assert [values.step for _, values in found.read()] == [3]


def test_searches_become_less_frequent_after_several_have_found_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OFTEN_S", "PAUSE"):
        monkeypatch.setattr(metrics_folders, name, 0.0)
    found = folders(tmp_path)
    for n in range(FRUITLESS):
        write(tmp_path / f"work/{n}/events.out.tfevents.1", event(1, {"a": 1}))
        assert len(list(found.read())) == 1
    for _ in range(FRUITLESS):
        assert list(found.read()) == []
    write(tmp_path / "work/last/events.out.tfevents.1", event(1, {"a": 1}))
    assert list(found.read()) == []
    # The final search, after the program has ended, finds it.
    assert len(list(found.read(is_last=True))) == 1


class Ticking:
    """A clock that advances by one second each time it is read."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 1.0
        return self._now


def test_a_search_that_takes_too_long_stops_in_the_middle_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(50):
        write(tmp_path / f"work/events.out.tfevents.{n}", event(1, {"a": 1}))
    monkeypatch.setattr(metrics_folders, "time", Ticking())
    monkeypatch.setattr(metrics_folders, "SEARCH_S", 20.0)
    found = folders(tmp_path)
    list(found.read())
    assert 0 < len(found.positions) < 30


def test_an_unchanged_file_is_not_reopened_even_if_its_last_record_is_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "work/events.out.tfevents.1"
    write(path, event(1, {"a": 1}) + event(2, {"a": 2})[:-1])
    found = folders(tmp_path)
    assert [values.step for _ in range(2) for _, values in found.read(is_last=True)] == [1]
    position = found.positions[str(path)]
    assert position.is_read
    # A reader that opened the file again would notice this damage.
    status = path.stat()
    path.write_bytes(event(1, {"a": 1}) + bytes(status.st_size - position.place))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert list(found.read(is_last=True)) == []
    assert not position.is_damaged


def test_old_hidden_linked_and_excluded_files_are_not_read(tmp_path: Path) -> None:
    name = "events.out.tfevents.1"
    write(tmp_path / "work/data/runs/1/tb" / name, event(1, {"a": 1}))
    write(tmp_path / "work/.cache" / name, event(1, {"a": 1}))
    write(tmp_path / "work/old" / name, event(1, {"a": 1}))
    os.utime(tmp_path / "work/old" / name, (1, 1))
    write(tmp_path / "elsewhere" / name, event(1, {"a": 1}))
    (tmp_path / "work/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"work/{name}").symlink_to(tmp_path / "elsewhere" / name)
    assert list(folders(tmp_path, since=1000.0).read()) == []


@pytest.mark.parametrize(("mode", "steps"), [("ab", []), ("rb", [1])])
def test_a_file_that_another_program_has_open_for_writing_is_not_read(
    mode: str, steps: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "work/events.out.tfevents.1"
    write(path, event(1, {"a": 1}))
    command = [sys.executable, "-c", f"f = open({str(path)!r}, {mode!r}); print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        assert [values.step for _, values in folders(tmp_path).read()] == steps
        assert [values.step for _, values in folders(tmp_path, pids=lambda: [other.pid]).read()] == [1]
        other.kill()
