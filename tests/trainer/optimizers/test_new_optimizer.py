"""Tests that adding an optimizer, with its checks, estimates and checkpoints, takes just one file and one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import toy_optimizer
from support.workloads import workload

from trainer.api import train
from trainer.contract.planning import memory
from trainer.contract.settings.catalog import OPTIMIZERS
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import job_of, parse_job
from trainer.contract.settings.sections import choices_of, find_setting, section_settings
from trainer.training.loop import Trainer


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "heavy_ball", toy_optimizer.ENTRY)


@pytest.fixture
def job(activations: Path) -> JobConfig:
    train = {"optimizer": "heavy_ball", "batch_size": 128, "n_steps": 20, "log_every": 5, "checkpoint_every": 10}
    return job_of({"data": {"path": str(activations)}, "sae": {"d_sae": 64, "k": 4}, "train": train})


def test_a_new_optimizer_can_be_chosen_and_its_settings_are_checked() -> None:
    setting = find_setting("train.optimizer")
    assert setting
    assert "heavy_ball" in choices_of("train.optimizer", setting)
    assert "heaviness" in {setting.name for setting in section_settings("train", "heavy_ball")}
    _, problems = parse_job({"data": {"path": "x"}, "train": {"optimizer": "heavy_ball", "heaviness": 1}})
    assert [problem.path for problem in problems] == ["train.heaviness"]


def test_a_new_optimizers_state_memory_is_estimated(job: JobConfig) -> None:
    adam = job_of({"data": {"path": "x"}, "sae": {"d_sae": 64, "k": 4}, "train": {"state": "fp32"}})
    assert memory.estimate(workload(job, 16)).optimizer * 2 == memory.estimate(workload(adam, 16)).optimizer


def test_a_new_optimizer_trains_and_resumes_from_a_checkpoint(
    job: JobConfig, make_trainer: Callable[..., Trainer], kept: Any, tmp_path: Path
) -> None:
    assert make_trainer(job, kept).run()
    fvu = kept.curve("fvu")
    assert fvu[-1] < 0.9 * fvu[0]
    middle = tmp_path / "checkpoints" / "step-00000010"
    assert make_trainer(job, resume_from=middle, checkpoints=tmp_path / "c2", output=tmp_path / "resumed").run()
    for file in ("sae_weights.safetensors", "cfg.json"):
        assert (tmp_path / "resumed" / file).read_bytes() == (tmp_path / "sae" / file).read_bytes()


def test_a_new_optimizer_can_be_used_from_python() -> None:
    x = torch.randn(1024, 16)
    fitted = train([x], optimizer="heavy_ball", heaviness=0.5, d_sae=64, k=4, n_steps=10, device="cpu")
    assert fitted.values["fvu"] < 2
