"""A run that learns its rows by heart says so, and keeps the checkpoint at which it was best."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainer.contract.runs.checkpoint_manifest import best_first, newest_first, read_state
from trainer.contract.runs.how_far import from_metadata
from trainer.contract.settings.job import JobConfig
from trainer.training.export_checkpoint import checkpoint_of

MakeJob = Callable[..., JobConfig]


def test_a_run_of_few_rows_reports_that_it_was_better_before_and_keeps_that_checkpoint(
    make_job: MakeJob, make_trainer: Callable[..., Any], kept: Any, tmp_path: Path
) -> None:
    # Noise has nothing to learn but the rows themselves.
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
    told = trainer.how_far()
    assert told.best
    assert told.best.step < 400
    assert told.best.fvu < 0.9 * told.heldout_fvu
    assert told.passes == 200.0
    (message,) = [message for kind, level, message in kept.events if kind == "overfitting" and level == "warning"]
    assert f"held-out FVU was best at step {told.best.step} (" in message
    assert f"`--best` exports the checkpoint of step {told.best.step}" in message
    saved = newest_first(tmp_path / "run" / "checkpoints")
    assert [read_state(folder).position.step for folder in saved] == [400, told.best.step]
    (tmp_path / "run" / "job.toml").touch()
    assert checkpoint_of(tmp_path / "run", True)[1] == best_first(saved)[0] == saved[1]
    exported = from_metadata(json.loads((tmp_path / "sae" / "cfg.json").read_text())["metadata"])
    assert exported
    assert exported.overfitting == told.overfitting
