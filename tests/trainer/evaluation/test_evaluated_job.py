"""Tests for reading an evaluated run's job: remote code requires consent, and other users' files are not trusted."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli import main
from trainer.contract.errors import UserError
from trainer.contract.runs.rank_spec import EXIT_USAGE
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


def test_remote_code_requires_consent_and_a_file_writable_only_by_the_user(
    file: Path,
) -> None:
    with pytest.raises(UserError, match=r"job\.toml"):
        evaluated_job(write(file, "remote_code = true", 0o666))
    with pytest.raises(UserError, match=r"others may write"):
        evaluated_job(write(file, "remote_code = true", 0o666), allows_code=True)
    own = write(file, "remote_code = true", 0o600)
    with pytest.raises(UserError, match=r'data.remote_code: runs the Python code that comes with "theirs/model"'):
        evaluated_job(own)
    assert evaluated_job(own, allows_code=True).data.settings.remote_code


@pytest.mark.parametrize("command", ["run", "extract", "join", "bench", "resume"])
def test_no_command_runs_remote_code_without_consent(file: Path, command: str, capsys) -> None:
    write(file, "remote_code = true", 0o600)
    section = "data"
    if command == "extract":
        model = 'path = "theirs/model"\nhooks = ["resid_post.1"]\nremote_code = true'
        file.write_text(f'kind = "extract"\n[model]\n{model}\n[text]\npath = "x.txt"\n[extract]\noutput = "acts"\n')
        section = "model"
    out = ["--out", str(file.parent / "out")] if command in ("run", "join") else []
    given = file.parent if command == "resume" else file
    assert main([command, str(given), *out]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith(f'{section}.remote_code: runs the Python code that comes with "theirs/model" as you; add ')
    assert sorted(file.parent.iterdir()) == [file]


def test_another_users_run_is_measured_in_fp32_if_it_needs_no_remote_code(file: Path) -> None:
    job = evaluated_job(write(file, "", 0o666))
    assert job.train.precision == "fp32"
    assert not job.data.settings.remote_code
