"""Checks that an interactive reading has the units in which an evaluation stores activations."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.extractions import CPU, extraction_job, run
from support.tiny_models import make_model, sentences

from trainer.cli import main
from trainer.contract.answers.interaction import Generate, Generated, ReadText, Steered
from trainer.contract.runs.features import ACTS_SCALE, FEATURES, Features
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job
from trainer.evaluation.contexts import write_features
from trainer.interaction.session import ModelSession
from trainer.training.loop import Trainer

HOOK = "resid_post.1"


@pytest.fixture
def folder(tmp_path: Path, make_job: Callable[..., JobConfig], make_trainer: Callable[..., Trainer]) -> Path:
    """Return an exported SAE, trained on rows of a tiny model and evaluated, with the texts next to it."""
    texts = sentences(80)
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    model = make_model(tmp_path / "gpt2", "gpt2")
    job = extraction_job(model, tmp_path / "corpus.jsonl", tmp_path / "rows", hooks=[HOOK], n_tokens=10_000)
    run(job)
    training = make_job(data={"path": str(job.folder(HOOK))}, train={"batch_size": 64, "n_steps": 60})
    run_folder = tmp_path / "run"
    assert make_trainer(training, checkpoints=run_folder / "checkpoints", output=run_folder / "sae").run()
    (run_folder / "job.toml").write_text(dump_job(training))
    assert main(["eval", str(run_folder), "--device", "cpu"]) == 0
    return run_folder / "sae"


def test_activations_have_the_units_of_the_stored_ones(folder: Path) -> None:
    features, interaction = Features(folder / FEATURES), ModelSession(folder, CPU)
    assert interaction.ready.has_scale
    assert features.acts_scale
    assert not 0.9 < features.acts_scale < 1.1
    ratios = []
    texts = [interaction.read(ReadText(text)) for text in sentences(80)]
    for latent in features.order()[:20]:
        acts = (one.act for text in texts for token in text.tokens for one in token.latents if one.latent == latent)
        ratios.append(max(acts, default=0.0) / features.feature(latent).largest)
    # Some stored rows are from texts that were split.
    assert statistics.median(ratios) == pytest.approx(1, rel=0.01)


def test_steering_to_the_activation_that_was_read_changes_nothing(folder: Path) -> None:
    features, interaction = Features(folder / FEATURES), ModelSession(folder, CPU)
    both = [(one, interaction.read(ReadText(one)).tokens) for one in ("a cat", "the cat", "cat", "dog", "a a", "hill")]
    prompt, (_, last) = next((one, tokens) for one, tokens in both if len(tokens) == 2)
    strongest = last.latents[0]
    strength = strongest.act / features.feature(strongest.latent).largest
    kl = []
    for one in (strength, 2 * strength):
        *_, answer = interaction.generate(Generate(prompt, (Steered(strongest.latent, one),), n_tokens=1))
        assert isinstance(answer, Generated)
        kl.append(answer.kl[1].kl)
    assert kl[0] < 1e-6 < 1e-4 < kl[1]


def test_features_of_an_earlier_version_are_used_with_a_warning(folder: Path) -> None:
    tensors = load_file(folder / FEATURES)
    del tensors[ACTS_SCALE]
    write_features(folder, tensors)
    assert not ModelSession(folder, CPU).ready.has_scale
