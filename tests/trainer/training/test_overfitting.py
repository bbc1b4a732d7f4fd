"""Tests that when a run overfits its training rows, it issues a warning and keeps its best checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainer.contract.runs.checkpoint_manifest import best_first, newest_first, read_state
from trainer.contract.runs.how_far import from_metadata
from trainer.contract.settings.job import JobConfig
from trainer.training.export_checkpoint import checkpoint_of

MakeJob = Callable[..., JobConfig]


@pytest.mark.slow
def test_an_overfitting_run_warns_and_keeps_its_best_checkpoint(
    make_job: MakeJob, make_trainer: Callable[..., Any], kept: Any, tmp_path: Path
) -> None:
    # The rows are noise, so a run can only memorise them.
    (tmp_path / "noise").mkdir()
    rows = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
    save_file({"activations": rows}, tmp_path / "noise" / "a.safetensors")
    job = make_job(
        data={"path": str(tmp_path / "noise"), "held_out_tokens": 200},
        sae={"d_sae": 400, "k": 4, "dead_after_tokens": "auto"},
        train={"n_steps": 400, "lr": 0.01, "batch_size": 100, "eval_every": 20, "checkpoint_every": 20}
        | {"keep_checkpoints": 1},
    )
    trainer = make_trainer(job, kept, checkpoints=tmp_path / "run" / "checkpoints")
    trainer.run()
    how_far = trainer.how_far()
    assert how_far.best
    assert how_far.best.step < 400
    assert how_far.best.fvu < 0.9 * how_far.heldout_fvu
    assert how_far.passes == 200.0
    (message,) = [message for kind, level, message in kept.events if kind == "overfitting" and level == "warning"]
    assert f"held-out FVU was best at step {how_far.best.step} (" in message
    assert f"`--best` exports the checkpoint of step {how_far.best.step}" in message
    saved = newest_first(tmp_path / "run" / "checkpoints")
    assert [read_state(folder).position.step for folder in saved] == [400, how_far.best.step]
    (tmp_path / "run" / "job.toml").touch()
    assert checkpoint_of(tmp_path / "run", True)[1] == best_first(saved)[0] == saved[1]
    exported = from_metadata(json.loads((tmp_path / "sae" / "cfg.json").read_text())["metadata"])
    assert exported
    assert exported.overfitting == how_far.overfitting
