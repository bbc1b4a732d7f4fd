"""Tests that the shape of a job's data is determined without loading it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sources import DataShape

MakeJob = Callable[..., JobConfig]


@pytest.fixture
def stored(write_shard: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return a function that writes inputs [1000, 8] and targets [n_targets, 24], and returns the path settings."""

    def write(n_targets: int = 1000) -> dict[str, str]:
        write_shard(n_targets - 10, 24)
        write_shard(10, 24, file="b.safetensors").rename(tmp_path / "targets")
        return {"path": str(write_shard()), "target_path": str(tmp_path / "targets")}

    return write


def problem(job: JobConfig) -> Problem:
    with pytest.raises(JobFileError) as caught:
        job.data_shape()
    (refusal,) = caught.value.problems
    return refusal


def test_the_shape_of_shards_comes_from_their_headers(make_job: MakeJob, write_shard: Callable[..., Path]) -> None:
    write_shard(30, file="b.safetensors")
    assert make_job(data={"path": str(write_shard(20))}).data_shape() == DataShape(8, None, 50)


def test_a_job_with_targets_trains_a_transcoder(make_job: MakeJob, stored: Callable[..., dict[str, str]]) -> None:
    assert make_job(data=stored()).data_shape() == DataShape(8, 24, 1000)


def test_every_row_needs_its_target(make_job: MakeJob, stored: Callable[..., dict[str, str]]) -> None:
    data = stored(999)
    refusal = problem(make_job(data=data))
    assert refusal.path == "data.target_path"
    sentence = f"{data['target_path']} has 999 rows, but {data['path']} has 1,000; every row needs its target"
    assert refusal.message == sentence


def test_unreadable_targets_are_reported_with_their_own_setting(
    make_job: MakeJob, stored: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    data = stored()
    missing = problem(make_job(data=data | {"target_path": "/nowhere"}))
    assert str(missing).startswith("data.target_path: there is nothing at /nowhere")
    (tmp_path / "targets" / "b.safetensors").write_bytes(b"short")
    assert str(problem(make_job(data=data))).startswith(f"data.target_path: {tmp_path}/targets/b.safetensors is not")
    assert problem(make_job(data=data | {"path": "/nowhere"})).path == "data.path"


def test_the_shape_of_synthetic_data_comes_from_the_settings(make_job: MakeJob) -> None:
    job = make_job(data={"source": "synthetic", "d_in": 12, "n_rows": 500})
    assert job.data_shape() == DataShape(12, None, 500)
