"""Whose runs may be measured, and what of them is not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.contract.errors import UserError
from trainer.evaluation.evaluated_job import evaluated_job

STREAM = """
[data]
source = "model"
model = "theirs/model"
hook = "resid_post.1"
text = "corpus.txt"
{more}
[train]
precision = "bf16"
n_steps = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.toml"


def write(file: Path, more: str, mode: int) -> Path:
    file.write_text(STREAM.format(more=more))
    file.chmod(mode)
    return file


def test_code_that_a_model_brings_is_only_run_by_a_job_file_that_nobody_else_may_write(file: Path) -> None:
    with pytest.raises(UserError, match=r"job\.toml"):
        evaluated_job(write(file, "remote_code = true", 0o666))
    assert evaluated_job(write(file, "remote_code = true", 0o600)).data.knobs.remote_code


def test_any_other_run_of_somebody_else_is_measured_in_fp32(file: Path) -> None:
    job = evaluated_job(write(file, "", 0o666))
    assert job.train.precision == "fp32"
    assert not job.data.knobs.remote_code
