"""Tests how long ranks wait while another rank saves a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.rank_faults import end_with_patience

from trainer.contract.runs.rank_spec import EXIT_FAILED
from trainer.contract.settings.job import JobConfig
from trainer.ranks.rank import LEAST_PATIENCE_S
from trainer.ranks.training_work import patience_s

MakeJob = Callable[..., JobConfig]


def test_ranks_wait_as_long_as_a_slow_disk_takes_to_write_a_checkpoint(make_job: MakeJob) -> None:
    job = make_job()
    assert patience_s(job, 2) == LEAST_PATIENCE_S
    d_in = job.data_shape().d_in
    large = make_job(sae={"d_sae": 2**32 // d_in})
    # An encoder and a decoder with 2^32 weights each, plus Adam's two moments, take 96 GiB.
    # A slow disk writes 50 MB per second.
    assert 96 * 2**30 / 50e6 < patience_s(large, 2) < 1.05 * 96 * 2**30 / 50e6


def test_ranks_wait_for_the_default_time_if_the_data_is_missing(make_job: MakeJob, tmp_path: Path) -> None:
    assert patience_s(make_job(data={"path": str(tmp_path / "gone")}), 2) == LEAST_PATIENCE_S


def test_connections_between_ranks_have_the_same_timeout(
    make_job: MakeJob, start_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    assert start_ranks(make_job(), 2, prepare=end_with_patience).wait() == [EXIT_FAILED] * 2
    told = [json.loads(file.read_text())["error"] for file in sorted(tmp_path.rglob("*exit.json"))]
    assert told == ["the others wait 10000 s"] * 2
