"""Tests for copying a remote rank's progress into the run's store."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest

from sae_tui.jobs.launchers.ingest import Ingest
from trainer.contract.store.database import StoreError
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesReader, SeriesWriter
from trainer.contract.store.progress_line import ProgressLine, encode, stored_rows
from trainer.contract.store.rows import Event


def line(step: int, value: float = 0.5, *, told: str = "", rewind: int | None = None) -> bytes:
    events = (Event(timestamp=float(step), level="info", kind="said", message=told),) if told else ()
    heartbeat = Heartbeat("training", step, 100, 64 * step, float(step))
    back = None if rewind is None else Heartbeat("resuming", rewind, 100, 64 * rewind, 0.0)
    return encode(ProgressLine(stored_rows([MetricRow("loss", step, value)]), heartbeat, events, back))


class Run:
    def __init__(self, folder: Path) -> None:
        self.file, self.db = folder / "progress.jsonl", folder / "metrics.db"

    def append(self, content: bytes) -> None:
        with self.file.open("ab") as stream:
            stream.write(content)

    @property
    def losses(self) -> dict[int, float | None]:
        with contextlib.closing(SeriesReader(self.db)) as reader:
            return {point.step: point.value for point in reader.points("loss")}

    @property
    def told(self) -> list[str]:
        with contextlib.closing(SeriesReader(self.db)) as reader:
            return [event.message for event in reader.events()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_an_incomplete_line_is_read_once_it_is_complete(run: Run) -> None:
    ingest = Ingest(run.file, run.db)
    ingest.poll()
    whole = line(2)
    run.append(line(1, math.nan) + whole[:20])
    ingest.poll()
    assert run.losses == {1: None}
    run.append(whole[20:])
    ingest.poll()
    assert run.losses == {1: None, 2: 0.5}
    ingest.close()


def test_a_line_that_is_never_completed_is_skipped(run: Run) -> None:
    run.append(line(1) + line(2)[:20] + b"\n" + line(3))
    ingest = Ingest(run.file, run.db)
    ingest.poll()
    ingest.close()
    assert run.losses == {1: 0.5, 3: 0.5}


def test_a_restarted_reader_stores_nothing_twice_even_without_its_saved_offset(run: Run) -> None:
    run.append(line(1, told="first"))
    first = Ingest(run.file, run.db)
    first.poll()
    first.close()
    run.append(line(2, told="second"))
    second = Ingest(run.file, run.db)
    second.poll()
    second.close()
    run.file.with_suffix(".offset").write_text("0")
    third = Ingest(run.file, run.db)
    run.append(line(3, told="third"))
    third.poll()
    third.close()
    assert run.losses == {1: 0.5, 2: 0.5, 3: 0.5}
    assert run.told == ["first", "second", "third"]


def test_a_resumed_run_replaces_the_history_after_the_step_it_resumes_from(run: Run) -> None:
    run.append(line(1) + line(2) + line(3, 9.0) + line(3, 0.25, rewind=2))
    ingest = Ingest(run.file, run.db)
    ingest.poll()
    ingest.close()
    assert run.losses == {1: 0.5, 2: 0.5, 3: 0.25}


def test_a_deleted_store_is_recreated_from_all_lines(run: Run) -> None:
    run.append(line(1, told="first"))
    ingest = Ingest(run.file, run.db)
    ingest.poll()
    for file in run.db.parent.glob("metrics.db*"):
        file.unlink()
    run.append(line(2, told="second"))
    ingest.poll()
    ingest.close()
    assert (run.losses, run.told) == ({1: 0.5, 2: 0.5}, ["first", "second"])


def test_lines_rejected_by_a_locked_store_are_stored_later(run: Run, locked_store) -> None:
    SeriesWriter(run.db).close()
    run.append(line(1, told="once"))
    ingest = Ingest(run.file, run.db)
    with locked_store(run.db), pytest.raises(StoreError, match="locked"):
        ingest.poll()
    ingest.poll()
    ingest.close()
    assert (run.losses, run.told) == ({1: 0.5}, ["once"])
