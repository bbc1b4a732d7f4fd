"""Fixtures for training on real ranks with a mirror that receives the metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.cli import main
from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job

Train = Callable[..., Path]


@pytest.fixture
def train(make_job: Callable[..., JobConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Return a function that trains two SAEs for 20 steps with a mirror, and returns the run's folder.

    The user's own configuration for the metrics tool, such as a login, is hidden.
    """
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))

    def run(mirror: str) -> Path:
        job = make_job(sae={"k": [2, 4]}, train={"mirror": mirror, "checkpoint_every": 10}, launch={"gpus": "cpu"})
        (tmp_path / "job.toml").write_text(dump_job(job))
        assert main(["run", str(tmp_path / "job.toml"), "--out", str(tmp_path / "run")]) == EXIT_FINISHED
        return tmp_path / "run"

    return run
