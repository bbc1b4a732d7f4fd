"""Tests for the thread that follows a job's logs."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from sae_tui.jobs.files import LogFollower
from sae_tui.jobs.view import logs
from sae_tui.jobs.view.logs import LogLine, LogReader


def test_a_log_reader_reports_an_error_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "0.log"
    log.write_text("step 1\n")
    read, failures = LogFollower.from_end, [OSError("stale file handle")]

    def from_end(path: Path, n_lines: int) -> tuple[list[str], LogFollower]:
        if failures:
            raise failures.pop()
        return read(path, n_lines)

    monkeypatch.setattr(LogFollower, "from_end", from_end)
    monkeypatch.setattr(logs, "AGAIN_S", 0.01)
    batches: queue.SimpleQueue[tuple[LogLine, ...]] = queue.SimpleQueue()
    reader = LogReader({"0": log}, lambda lines: batches.put(tuple(lines)))
    reader.start()
    (first,) = batches.get(timeout=10)
    assert "cannot be read" in first.text
    assert "stale file handle" in first.text
    assert [line.text for line in batches.get(timeout=10)] == ["step 1"]
    reader.stop()
