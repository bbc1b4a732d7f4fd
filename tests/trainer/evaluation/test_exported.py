"""Tests that an SAE loaded from its files computes the same results as the exported SAE."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.contract.errors import UserError
from trainer.contract.settings.catalog import ARCHITECTURES, FORMATS
from trainer.contract.settings.job import JobConfig
from trainer.evaluation.exported import read_exported
from trainer.training.loop import Trainer

CPU = torch.device("cpu")
MakeTrainer = Callable[..., Trainer]
MakeJob = Callable[..., JobConfig]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_sae_loaded_from_files_reconstructs_just_like_the_trained_one(
    architecture: str, make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(make_job(sae={"architecture": architecture}))
    assert trainer.run()
    (learner,) = trainer.learners.values()
    x, _ = trainer.data.of_hook(0).sample(0)
    x = x.float()
    read = read_exported(tmp_path / "sae", CPU)
    assert (read.architecture, read.tokens) == (architecture, trainer.position.tokens)
    with torch.no_grad(), learner.evaluating():
        own = learner.forward(x * learner.sae.x_scale, x * learner.sae.y_scale)
    acts, x_hat = read.reconstruct(x)
    # If a pre-activation is close to the threshold, its latent may be active in only one of the two SAEs.
    assert float(((own.x_hat / learner.sae.y_scale - x_hat).norm(dim=1) < 1e-3).float().mean()) > 0.99
    assert float((acts.values > 0).sum()) == pytest.approx(float((own.acts.dense() > 0).sum()), rel=1e-3)


def test_a_transcoder_loaded_from_files_gives_the_same_output_as_the_trained_one(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    targets = tmp_path / "targets"
    targets.mkdir()
    save_file({"activations": torch.randn(3000, 12)}, targets / "a.safetensors")
    trainer = make_trainer(make_job(data={"target_path": str(targets)}, sae={"architecture": "batch_topk"}))
    assert trainer.run()
    (learner,) = trainer.learners.values()
    x, y = (rows.float() for rows in trainer.data.of_hook(0).sample(0))
    with torch.no_grad(), learner.evaluating():
        own = learner.forward(x * learner.sae.x_scale, y * learner.sae.y_scale).x_hat / learner.sae.y_scale
    _, x_hat = read_exported(tmp_path / "sae", CPU).reconstruct(x)
    assert float(((own - x_hat).norm(dim=1) < 1e-3).float().mean()) > 0.99


@pytest.fixture
def exported(make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path) -> Path:
    assert make_trainer(make_job(train={"n_steps": 2})).run()
    return tmp_path / "sae"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "crosscoder"}, "architecture is 'crosscoder'; only"),
        ({"normalize_activations": "layer_norm"}, "normalize_activations is 'layer_norm': it centres"),
        ({"k": 0}, "k must be"),
        ({"architecture": "gated"}, "has no tensor b_gate; its settings describe a different type of SAE"),
    ],
)
def test_an_unsupported_or_inconsistent_sae_is_refused(change: dict, words: str, exported: Path) -> None:
    config = json.loads((exported / "cfg.json").read_text())
    (exported / "cfg.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=words):
        read_exported(exported, CPU)


@pytest.mark.parametrize("form", ["sparsify", "dictionary_learning"])
def test_an_sae_in_another_tools_format_has_the_same_reconstruction(form: str, exported: Path, tmp_path: Path) -> None:
    shared = FORMATS["saelens"].load()().read(exported)
    FORMATS[form].load()().write(shared, tmp_path / form)
    x = torch.randn(50, shared.d_in)
    _, own = read_exported(exported, CPU).reconstruct(x)
    torch.testing.assert_close(read_exported(tmp_path / form, CPU).reconstruct(x)[1], own, rtol=1e-4, atol=1e-4)


def test_damaged_files_are_refused(exported: Path) -> None:
    weights = exported / "sae_weights.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"W_dec": tensors["W_dec"][:-1].contiguous()}, weights)
    with pytest.raises(UserError, match=r"W_dec is .* instead of"):
        read_exported(exported, CPU)
    weights.write_bytes(b"nothing")
    with pytest.raises(UserError, match="is not a complete safetensors file"):
        read_exported(exported, CPU)
    (exported / "cfg.json").write_text("[")
    with pytest.raises(UserError, match="cannot be read"):
        read_exported(exported, CPU)
