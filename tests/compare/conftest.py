"""Fixtures that record two runs: one with a single SAE and one with a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.tui import NOW, record_job

from sae_tui.compare.runs import Runs
from trainer.contract.paths import DataDir
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.states import JobState


def job_file(**sae: object) -> str:
    job, problems = parse_job({"name": "x", "data": {"path": "data/sample"}, "sae": sae})
    assert not problems
    return dump_job(job)


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    data_dir = DataDir(tmp_path / "data")
    data_dir.create()
    return data_dir


@pytest.fixture
def pair(data: DataDir) -> tuple[int, int]:
    """Record a single run and a sweep over k, and return their ids."""
    plain = record_job(data, "plain", JobState.FINISHED, config=job_file(k=16), fvu=0.2, l0=16.0)
    sweep = record_job(data, "sweep", JobState.RUNNING, config=job_file(k=[8, 32]))
    write(
        data,
        plain,
        [MetricRow("fvu", 10, 0.4), MetricRow("fvu", 20, 0.2), MetricRow("l0", 20, 16.0), MetricRow("lr", 20, 1e-3)],
    )
    members = {"k=8": (0.5, 8.0), "k=32": (0.1, 32.0)}
    rows = [MetricRow("tokens_per_s", 20, 900.0), MetricRow("fvu", 20, 0.5), MetricRow("l0", 20, 8.0)]
    for label, (fvu, l0) in members.items():
        rows += [MetricRow(f"fvu@{label}", 20, fvu), MetricRow(f"l0@{label}", 20, l0)]
    write(data, sweep, rows)
    return plain, sweep


@pytest.fixture
def runs(data: DataDir, pair: tuple[int, int]) -> Iterator[Runs]:
    with closing(Runs(data, pair)) as opened:
        yield opened


def write(data: DataDir, job_id: int, rows: list[MetricRow], steps: int = 20) -> None:
    """Write metrics as rank 0 does, with 100 tokens per step."""
    paths = data.run(job_id)
    paths.create()
    with closing(SeriesWriter(paths.metrics_db)) as writer:
        writer.write(rows, Heartbeat("training", steps, 40, 100 * steps, NOW))
