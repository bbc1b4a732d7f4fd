"""How long ranks wait for one that writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.contract.settings.job import JobConfig
from trainer.ranks.patience import LEAST_S, patience_s

MakeJob = Callable[..., JobConfig]


def test_ranks_wait_as_long_as_a_slow_disk_takes_for_a_checkpoint(make_job: MakeJob) -> None:
    job = make_job()
    assert patience_s(job, 2) == LEAST_S
    d_in = job.data_shape().d_in
    large = make_job(sae={"d_sae": 2**32 // d_in})
    # Encoder and decoder of 2^32 weights each, with Adam's two moments: 96 GiB at 50 MB/s.
    assert 96 * 2**30 / 50e6 < patience_s(large, 2) < 1.05 * 96 * 2**30 / 50e6


def test_ranks_of_a_job_whose_data_is_gone_have_the_usual_patience(make_job: MakeJob, tmp_path: Path) -> None:
    assert patience_s(make_job(data={"path": str(tmp_path / "gone")}), 2) == LEAST_S
