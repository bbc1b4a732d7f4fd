"""Tests for `sae-train export`, which exports the SAEs from a checkpoint for other tools."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.extractions import extraction_job
from support.extractions import run as extract
from support.report_cards import FIGURES, card_table, put_card
from support.saes import peer
from support.tiny_models import make_model, sentences
from torch import Tensor

from trainer.cli import main
from trainer.contract.runs.card_versions import weights_of
from trainer.contract.runs.checkpoint_manifest import MANIFEST, RANDOM, STATE, TENSORS, manifest_of, newest_whole
from trainer.contract.runs.explanations import Explanation, read_explanations, record
from trainer.contract.runs.how_far import HowFar, exported_tokens, from_metadata
from trainer.contract.runs.latent_notes import NOTES, change_note, read_notes
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_USAGE
from trainer.contract.runs.recipe import RECIPE, read_recipe
from trainer.contract.runs.report_card import Stability, Twin
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job
from trainer.evaluation.exported import read_exported
from trainer.reporting.progress import RunProgress
from trainer.training.export_checkpoint import export_checkpoint
from trainer.training.hub_card import hub_card
from trainer.training.loop import Trainer

MakeRun = Callable[..., Trainer]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def make_run(make_job: Callable[..., JobConfig], make_trainer: Callable, run_dir: Path) -> MakeRun:
    """Return a function that trains in the run folder, with checkpoints at steps 10 and 20."""

    def make(**sections: Any) -> Trainer:
        job = make_job(**sections | {"train": {"checkpoint_every": 10} | sections.get("train", {})})
        run_dir.mkdir()
        (run_dir / "job.toml").write_text(dump_job(job))
        trainer = make_trainer(job, checkpoints=run_dir / "checkpoints", output=run_dir / "sae")
        trainer.run()
        return trainer

    return make


def export(run: Path, out: Path, *flags: str) -> int:
    return main(["export", str(run), "--out", str(out), *flags])


def read_sparsify(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a folder as sparsify does, check its tensors' names and shapes, and return its configuration and tensors."""
    config = json.loads((folder / "cfg.json").read_text())
    tensors = load_file(folder / "sae.safetensors")
    d_in, d_sae = config["d_in"], config["num_latents"]
    shapes = {"encoder.weight": (d_sae, d_in), "encoder.bias": (d_sae,), "W_dec": (d_sae, d_in), "b_dec": (d_in,)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    return config, tensors


def sparsify_forward(config: dict[str, Any], tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """Reconstruct x in float64, following sparsify's documentation for a TopK coder."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    x = x.double() if config["transcode"] else x.double() - weights["b_dec"]
    values, latents = (x @ weights["encoder.weight"].T + weights["encoder.bias"]).relu().topk(config["k"], dim=1)
    return (values.unsqueeze(2) * weights["W_dec"][latents]).sum(dim=1) + weights["b_dec"]


def test_an_export_from_the_newest_checkpoint_equals_the_runs_sae(
    make_run: MakeRun, run_dir: Path, tmp_path: Path
) -> None:
    make_run()
    assert export(run_dir, tmp_path / "out") == EXIT_FINISHED
    ours = load_file(run_dir / "sae" / "sae_weights.safetensors")
    for name, tensor in load_file(tmp_path / "out" / "sae_weights.safetensors").items():
        assert torch.equal(tensor, ours[name]), name
    config, expected = (json.loads((folder / "cfg.json").read_text()) for folder in (tmp_path / "out", run_dir / "sae"))
    measured = {"l0", "fvu", "dead_fraction", "heldout_fvu", "heldout_l0"}
    expected["metadata"] = {name: value for name, value in expected["metadata"].items() if name not in measured}
    # A trainer running in this process does not store the run's metrics.
    assert config == expected


def test_an_export_for_sparsify_reconstructs_like_the_sae(make_run: MakeRun, run_dir: Path, tmp_path: Path) -> None:
    (learner,) = make_run().learners.values()
    assert export(run_dir, tmp_path / "out", "--format", "sparsify") == EXIT_FINISHED
    config, tensors = read_sparsify(tmp_path / "out")
    assert config["metadata"].pop(RECIPE)["lr"] > 0
    assert from_metadata(config["metadata"]) == HowFar(step=20, total_steps=20, lr_share=0.0, passes=2560 / 2850)
    training = {name: config["metadata"][name] for name in ("training_architecture", "training_tokens")}
    config["metadata"] = training
    assert config == {
        "activation": "topk", "expansion_factor": 4, "normalize_decoder": True, "num_latents": 64, "k": 4,
        "multi_topk": False, "skip_connection": False, "transcode": False, "d_in": 16,
        "metadata": {"training_architecture": "topk", "training_tokens": 2560},
    }  # fmt: skip
    x = 3 * torch.randn(200, 16) + torch.arange(16)
    sae = learner.sae.eval()
    with torch.no_grad():
        x_hat = sae(x * sae.x_scale, x * sae.y_scale).x_hat / sae.y_scale
    torch.testing.assert_close(sparsify_forward(config, tensors, x), x_hat.double(), rtol=1e-5, atol=1e-4)


def test_exporting_a_sweep_writes_the_saes_that_fit_the_format_and_lists_the_others(
    make_run: MakeRun, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(sae={"architecture": ["topk", "jumprelu", "gated"]})
    labels = [f"architecture={one}" for one in ("topk", "jumprelu", "gated")]
    out = tmp_path / "out"
    capsys.readouterr()
    assert export(run_dir, out, "--format", "sparsify", "--json") == EXIT_FINISHED
    answer = json.loads(capsys.readouterr().out)
    assert answer["saes"] == {labels[0]: str(out / labels[0])}
    assert [*answer["left_out"]] == labels[1:]
    assert "exported as jumprelu" in answer["left_out"][labels[1]]
    assert [note.partition(" is not written: ")[0] for note in answer["notes"]] == labels[1:]
    assert [folder.name for folder in out.iterdir()] == labels[:1]
    # If no SAE fits the format, nothing is written, and a reason is given for each SAE.
    none = tmp_path / "none"
    arguments = ["--format", "sparsify", "--only", labels[2], "--only", labels[1]]
    assert export(run_dir, none, *arguments) == EXIT_FAILED
    error = capsys.readouterr().err
    assert error.startswith("--format: sparsify cannot represent any of these SAEs")
    assert all(f"{label}: sparsify supports only TopK" in error for label in labels[1:])
    assert not none.exists()
    assert export(run_dir, none, "--only", labels[1]) == EXIT_FINISHED
    assert capsys.readouterr().out == f"{labels[1]} of step 20 -> {none / labels[1]}\n"
    assert [folder.name for folder in none.iterdir()] == [labels[1]]
    assert export(run_dir, tmp_path / "third", "--only", "k=3") == EXIT_USAGE
    assert capsys.readouterr().err == f"--only: no SAE is called k=3; the SAEs are {', '.join(labels)}\n"
    # The hub's model card lists only the exported SAEs.
    card = hub_card([newest_whole(run_dir / "checkpoints")], "sparsify", "me/sae", labels[:1])
    assert labels[0] in card
    assert labels[1] not in card
    assert "learning rate" in card


def test_a_runs_recipe_states_the_settings_used_in_its_steps(make_run: MakeRun, run_dir: Path, tmp_path: Path) -> None:
    trainer = make_run(sae={"k": [2, 4]}, train={"global_batch_size": 192, "n_tokens": 3840, "warmup_fraction": 0.1})
    assert export(run_dir, tmp_path / "out") == EXIT_FINISHED
    for label, learner in trainer.learners.items():
        for folder in (run_dir / "sae", tmp_path / "out"):
            recipe = read_recipe(json.loads((folder / label / "cfg.json").read_text())["metadata"])
            assert recipe == trainer.recipe_of(label)
        assert (recipe.batch_tokens, recipe.steps, recipe.planned_steps, recipe.tokens) == (192, 20, 20, 3840)
        assert recipe.passes == pytest.approx(3840 / trainer.data.n_train)
        assert (recipe.warmup_fraction, recipe.target_l0) == (0.1, learner.sae.k)
        # The peak learning rate, between warm-up and decay, equals the rate in the recipe.
        decoder, encoder = (learner.optimizer.param_groups[place] for place in (0, 1))
        learner.begin_step(5)
        assert decoder["lr"] == pytest.approx(recipe.lr)
        assert encoder["lr"] == pytest.approx(recipe.encoder_lr)
        assert recipe.optimizer_settings["beta1"] == pytest.approx(decoder["betas"][0])
        assert recipe.optimizer_settings["beta2"] == pytest.approx(decoder["betas"][1])


def test_the_best_checkpoint_is_the_intact_one_with_the_lowest_held_out_fvu(
    make_run: MakeRun, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(train={"checkpoint_every": 5, "keep_checkpoints": 9})
    checkpoints = run_dir / "checkpoints"

    def best() -> int:
        return int(export_checkpoint(run_dir, tmp_path / "out", form="saelens", best=True, force=True)["step"])

    assert best() == 20  # in this run, the SAE improves at every step
    (checkpoints / "step-00000020" / STATE).write_text("{}")
    assert best() == 15
    (checkpoints / "step-00000015" / "tensors.safetensors").unlink()
    assert best() == 10
    for folder in checkpoints.iterdir():
        (folder / STATE).unlink()
    assert export(run_dir, tmp_path / "other", "--best") == EXIT_FAILED
    assert capsys.readouterr().err.startswith("--best: no complete checkpoint in")


def test_a_single_checkpoint_is_exported_by_its_own_path(
    make_run: MakeRun, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run()
    checkpoint = run_dir / "checkpoints" / "step-00000010"
    assert export(checkpoint, tmp_path / "out", "--json") == EXIT_FINISHED
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    notes = ["taken at step 10 of 20 with the learning rate at 83%"]
    expected = {"checkpoint": str(checkpoint), "step": 10, "output_path": str(tmp_path / "out"), "notes": notes}
    assert answer == expected
    assert json.loads((tmp_path / "out" / "cfg.json").read_text())["metadata"]["training_tokens"] == 1280
    assert export(checkpoint, tmp_path / "again", "--best") == EXIT_USAGE
    assert capsys.readouterr().err.startswith("--best: requires a run folder")


def test_every_sae_in_a_sweep_gets_its_own_folder(
    make_run: MakeRun, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(sae={"k": [2, 4]})
    assert export(run_dir, tmp_path / "out", "--format", "sparsify") == EXIT_FINISHED
    for label, k in (("k=2", 2), ("k=4", 4)):
        assert read_sparsify(tmp_path / "out" / label)[0]["k"] == k
    assert export(run_dir, tmp_path / "out") == EXIT_USAGE
    assert export(run_dir, tmp_path / "out", "--force") == EXIT_FINISHED
    for label in ("k=2", "k=4"):
        ours = load_file(run_dir / "sae" / label / "sae_weights.safetensors")
        for name, tensor in load_file(tmp_path / "out" / label / "sae_weights.safetensors").items():
            assert torch.equal(tensor, ours[name]), name


def test_random_twins_are_exported_only_by_name_and_their_figures_go_with_the_sae(
    make_run: MakeRun, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(train={"random_twin": True})
    twin = Twin(label="freeze=decoder", frozen="decoder", figures={"fvu": 0.6})
    put_card(run_dir / "sae" / "freeze=off", twins=[msgspec.to_builtins(twin)])
    out = tmp_path / "first"
    assert main(["export", str(run_dir), "--out", str(out), "--json"]) == EXIT_FINISHED
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [*done["saes"]] == ["freeze=off"]
    assert "random twins are not written; write one with --only freeze=decoder" in done["notes"]
    metadata = json.loads((out / "freeze=off" / "cfg.json").read_text())["metadata"]
    assert metadata["random_twins"][0]["figures"] == {"fvu": 0.6}
    assert metadata["training_recipe"]["freeze"] == "off"
    other = tmp_path / "other"
    assert main(["export", str(run_dir), "--out", str(other), "--only", "freeze=decoder"]) == EXIT_FINISHED
    metadata = json.loads((other / "freeze=decoder" / "cfg.json").read_text())["metadata"]
    assert metadata["training_recipe"]["freeze"] == "decoder"


@pytest.mark.parametrize("form", ["saelens", "sparsify"])
def test_an_sae_for_several_k_is_exported_with_a_smaller_k(
    form: str, make_run: MakeRun, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (learner,) = make_run(sae={"architecture": "hierarchical_topk", "k": 8, "n_levels": 2}).learners.values()
    figures, out = FIGURES | {"by_k": [{"k": 4, "fvu": 0.4}, {"k": 8, "fvu": 0.25}]}, tmp_path / "out"
    put_card(run_dir / "sae", figures=figures, weights=weights_of(run_dir / "sae"))
    assert export(run_dir, out, "--format", form, "--k", "4") == EXIT_FINISHED
    config = json.loads((out / "cfg.json").read_text())
    assert (config["k"], config["metadata"]["heldout_fvu"]) == (4, 0.4)
    assert config["metadata"]["training_recipe"]["target_l0"] == 4
    x = 3 * torch.randn(200, 16) + torch.arange(16)
    acts, x_hat = read_exported(out, torch.device("cpu")).reconstruct(x)
    assert (acts.values > 0).sum(dim=1).max() == 4
    sae = learner.sae.eval()
    with torch.no_grad(), sae.using(4):
        expected = sae(x * sae.x_scale, x * sae.y_scale).x_hat / sae.y_scale
    torch.testing.assert_close(x_hat, expected, rtol=1e-4, atol=1e-4)
    assert export(run_dir, out, "--format", form, "--k", "9", "--force") == EXIT_USAGE
    assert "--k: must be from 1 to the k, 8, not 9" in capsys.readouterr().err
    assert export(run_dir, out, "--format", form, "--k", "0", "--force") == EXIT_USAGE
    assert "--k: must be from 1 to the k, 8, not 0" in capsys.readouterr().err
    assert export(run_dir, run_dir / "sae", "--format", form, "--k", "4", "--force") == EXIT_USAGE
    assert "--out: is the run's own SAE, which keeps its k" in capsys.readouterr().err


def test_a_held_out_fvu_from_other_rows_or_other_weights_is_not_exported(
    make_run: MakeRun, run_dir: Path, tmp_path: Path
) -> None:
    make_run(sae={"architecture": "hierarchical_topk", "k": 8, "n_levels": 2})
    figures, sae = FIGURES | {"by_k": [{"k": 4, "fvu": 0.4}]}, run_dir / "sae"
    for name, parts in {
        "weights": {"weights": "0" * 16},
        "rows": {"weights": weights_of(sae), "data": card_table()["data"] | {"is_held_out": False}},
    }.items():
        put_card(sae, figures=figures, **parts)
        assert export(run_dir, tmp_path / name, "--k", "4") == EXIT_FINISHED
        metadata = json.loads((tmp_path / name / "cfg.json").read_text())["metadata"]
        assert "heldout_fvu" not in metadata, name


def test_the_model_card_of_an_export_with_a_smaller_k_shows_no_figures_of_the_full_k(
    make_run: MakeRun, run_dir: Path
) -> None:
    make_run(sae={"architecture": "hierarchical_topk", "k": 8, "n_levels": 2})
    (run_dir / "sae" / "README.md").write_text("# Sparse autoencoder\n\nFVU 0.1\n")
    checkpoint = newest_whole(run_dir / "checkpoints")
    assert "FVU 0.1" in hub_card([checkpoint], "saelens", "me/sae", k=8)
    card = hub_card([checkpoint], "saelens", "me/sae", k=4)
    assert "FVU" not in card
    assert "with k = 4." in card


def test_an_export_with_another_k_states_the_stability_of_the_decoder_but_not_of_the_activations(
    make_run: MakeRun, run_dir: Path, tmp_path: Path
) -> None:
    make_run(sae={"architecture": "hierarchical_topk", "k": 8, "n_levels": 2}, train={"seed": [0, 1]})
    stability = Stability(others=("seed=1",), share=0.5, pw_mcc=0.6, firing_correlation=0.4, n_rows=1000, rows="1f")
    put_card(run_dir / "sae" / "seed=0", stability=json.loads(msgspec.json.encode(stability)))
    for k, expected in (("8", (0.5, 0.4, 1000, "1f")), ("4", (0.5, None, 0, ""))):
        assert export(run_dir, tmp_path / k, "--k", k) == EXIT_FINISHED
        (file,) = (tmp_path / k).rglob("cfg.json")
        stated = json.loads(file.read_text())["metadata"]["stability"]
        assert tuple(stated[name] for name in ("share", "firing_correlation", "n_rows", "rows")) == expected


def test_an_sae_for_a_single_k_is_not_exported_with_a_different_k(
    make_run: MakeRun, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run()
    assert export(run_dir, tmp_path / "out", "--k", "2") == EXIT_USAGE
    assert "--k: the SAE is trained for a single k, 4; only SAEs with" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_lowest_of_several_seeds_is_exported_unless_another_one_is_named(
    make_run: MakeRun, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(train={"seed": [3, 1]}, sae={"k": [2, 4]})
    stability = Stability(others=("k=2,seed=3",), share=0.5, median=0.7, encoder_share=0.25, pw_mcc=0.6)
    put_card(run_dir / "sae" / "k=2,seed=1", stability=msgspec.to_builtins(stability))
    out = tmp_path / "first"
    assert main(["export", str(run_dir), "--out", str(out), "--json"]) == EXIT_FINISHED
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [*done["saes"]] == ["k=2,seed=1", "k=4,seed=1"]
    assert "only one seed is written; write another one with --only k=2,seed=3" in done["notes"]
    assert {folder.name for folder in out.iterdir() if folder.is_dir()} == {"k=2,seed=1", "k=4,seed=1"}
    metadata = json.loads((out / "k=2,seed=1" / "cfg.json").read_text())["metadata"]
    assert (metadata["stability"]["share"], metadata["stability"]["others"]) == (0.5, ["k=2,seed=3"])
    assert metadata["stability"]["firing_correlation"] is None
    other = tmp_path / "other"
    assert main(["export", str(run_dir), "--out", str(other), "--only", "k=4,seed=3", "--json"]) == EXIT_FINISHED
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [*done["saes"]] == ["k=4,seed=3"]
    assert not any("one seed" in note for note in done.get("notes", ()))
    # Pretend that an SAE's training failed, so that the run did not export it.
    shutil.rmtree(run_dir / "sae" / "k=2,seed=1")
    assert main(["export", str(run_dir), "--out", str(tmp_path / "left"), "--json"]) == EXIT_FINISHED
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [*done["saes"]] == ["k=2,seed=3", "k=4,seed=1"]


def test_an_export_overwrites_only_an_sae_and_only_with_force(
    make_run: MakeRun, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run()
    out = tmp_path / "out"
    out.mkdir()
    assert export(run_dir, out) == EXIT_FINISHED
    assert export(run_dir, out) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"--out: {out} already exists")
    assert export(run_dir, out, "--format", "sparsify", "--force") == EXIT_FINISHED
    assert {file.name for file in out.iterdir()} == {"cfg.json", "sae.safetensors"}
    (out / "thesis.tex").write_text("mine")
    for place in (out, out / "thesis.tex", run_dir):
        assert export(run_dir, place, "--force") == EXIT_USAGE
    assert (out / "thesis.tex").read_text() == "mine"
    assert (run_dir / "job.toml").exists()


def test_an_export_does_not_need_the_data(make_run: MakeRun, run_dir: Path, tmp_path: Path, activations: Path) -> None:
    (activations / "meta.json").write_text('{"model": "gpt2", "hook_name": "blocks.6", "n_tokens": 3000}')
    make_run()
    shutil.rmtree(activations)
    assert export(run_dir, tmp_path / "out") == EXIT_FINISHED
    metadata = json.loads((tmp_path / "out" / "cfg.json").read_text())["metadata"]
    assert (metadata["model_name"], metadata["hook_name"]) == ("gpt2", "blocks.6")


def test_a_folder_that_is_neither_a_run_nor_a_checkpoint_cannot_be_exported(
    make_run: MakeRun, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(tmp_path, tmp_path / "out") == EXIT_USAGE
    assert capsys.readouterr().err.startswith("RUN_DIR_OR_CHECKPOINT:")
    make_run()
    shutil.rmtree(run_dir / "checkpoints")
    assert export(run_dir, tmp_path / "out") == EXIT_FAILED
    assert capsys.readouterr().err.startswith("nothing to export: no checkpoint was saved in")


def with_tensors(**changes: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    """Return a function that changes or removes the named tensors in a checkpoint."""

    def tamper(checkpoint: Path) -> None:
        tensors = load_file(checkpoint / TENSORS)
        for name, change in changes.items():
            changed = change(tensors.pop(f"/sae.{name}"))
            tensors |= {} if changed is None else {f"/sae.{name}": changed.contiguous()}
        save_file(tensors, checkpoint / TENSORS)

    return tamper


def with_file(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda checkpoint: (checkpoint / name).write_bytes(content)


def with_random(**states: Tensor) -> Callable[[Path], object]:
    return lambda checkpoint: save_file(states, checkpoint / RANDOM)


def with_d_out(d_out: object) -> Callable[[Path], object]:
    def tamper(checkpoint: Path) -> None:
        state = json.loads((checkpoint / STATE).read_text())
        (checkpoint / STATE).write_text(json.dumps(state | {"d_out": d_out}))

    return tamper


TAMPERED = {
    "no encoder": with_tensors(W_enc=lambda _: None),
    "no decoder": with_tensors(W_dec=lambda _: None),
    "no bias": with_tensors(b_enc=lambda _: None),
    "a number instead of an encoder": with_tensors(W_enc=lambda one: one.sum()),
    "three dimensions": with_tensors(W_enc=lambda one: one[None]),
    "a width of 0": with_tensors(W_enc=lambda one: one[:0], W_dec=lambda one: one[:, :0]),
    "another width": with_tensors(W_enc=lambda one: one[:, :8]),
    "another bias": with_tensors(b_dec=lambda one: one[:3]),
    "no tensors": with_file(TENSORS, b""),
    "an invalid header": with_file(TENSORS, b"\xff" * 20),
    "no random state": with_random(),
    "a random state of the wrong type": with_random(cpu=torch.ones(3)),
    "a random state of the wrong size": with_random(cpu=torch.ones(3, dtype=torch.uint8)),
    "a state that is not UTF-8": with_file(STATE, b'{"position": {"step": 20, "tokens": 1}, "origin": {"a": "\xff"}}'),
    "a deeply nested state": with_file(
        STATE, b'{"position": {"step": 20, "tokens": 1}, "origin": ' + b'{"a":' * 90_000
    ),
    "a huge target width": with_d_out(2**40),
    "a negative target width": with_d_out(-1),
    "a target width that is not a number": with_d_out("wide"),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_a_tampered_checkpoint_produces_a_one_sentence_error(
    kind: str, make_run: MakeRun, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(train={"n_steps": 2})
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    TAMPERED[kind](checkpoint)
    (checkpoint / MANIFEST).unlink()
    (checkpoint / MANIFEST).write_text(json.dumps(manifest_of(checkpoint)))
    capsys.readouterr()
    assert export(checkpoint, tmp_path / "out") == EXIT_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(
        "cannot be used: .+; resume|cannot be used: |does not fit this job's SAE|is not a checkpoint", line
    ), line
    assert not (tmp_path / "out").exists()


def test_transcoders_from_several_runs_are_exported_as_one_circuit_tracer_set(
    make_job: Callable,
    make_trainer: Callable,
    activations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []
    for layer in (0, 1, 2):
        (activations / "meta.json").write_text(json.dumps({"hook_name": f"blocks.{layer}.mlp.hook_in"}))
        job = make_job(
            data={"target_path": str(activations)},
            sae={"architecture": "jumprelu", "skip": True, "d_sae": 64 if layer < 2 else 32},
        )
        runs.append(tmp_path / f"layer{layer}")
        stop, progress = threading.Event(), RunProgress()
        progress.heartbeat = lambda phase, step, tokens, stop=stop, last=4 + 99 * (layer != 1): (
            step >= last and stop.set()
        )
        folders = {"checkpoints": runs[-1] / "checkpoints", "output": runs[-1] / "sae"}
        make_trainer(job, progress, stop=stop, **folders).run()
        (runs[-1] / "job.toml").write_text(dump_job(job))
    command = ["export", "--out", str(tmp_path / "set"), "--format"]
    for chosen, form, reason in (
        (runs[:2], "saelens", "only circuit-tracer accepts a set of several runs"),
        ([runs[0], runs[0]], "circuit-tracer", "several transcoders belong to layer 0"),
        (
            [runs[0], runs[2]],
            "circuit-tracer",
            "circuit-tracer requires all transcoders of a set to match, but d_sae is 32",
        ),
    ):
        assert main([*command, form, *map(str, chosen)]) == EXIT_USAGE
        assert f"--format: {reason}" in capsys.readouterr().err
        assert not (tmp_path / "set").exists()
    assert main([*command, "circuit-tracer", str(runs[1]), str(runs[0])]) == EXIT_FINISHED
    assert "layer1: stopped at step 5 of 20" in (out := capsys.readouterr().out)
    assert "layer0: " not in out
    assert {file.name for file in (tmp_path / "set").iterdir()} == {
        "config.yaml", "layer_0.safetensors", "layer_1.safetensors",
    }  # fmt: skip
    tracer = peer(monkeypatch, "circuit_tracer.transcoder.single_layer_transcoder")
    files = {layer: str(tmp_path / "set" / f"layer_{layer}.safetensors") for layer in (0, 1)}
    loaded = tracer.load_transcoder_set(
        files, scan="", feature_input_hook="mlp.hook_in", feature_output_hook="mlp.hook_in", device=torch.device("cpu")
    )
    assert (loaded.n_layers, loaded.d_transcoder, loaded.skip_connection) == (2, 64, True)
    x = torch.randn(50, 16)
    for layer in (0, 1):
        own = read_exported(runs[layer] / "sae", torch.device("cpu")).reconstruct(x)[1]
        torch.testing.assert_close(loaded[layer](x), own, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_every_export_format_records_where_activations_were_extracted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "corpus.txt").write_text("\n\n".join(sentences(60)))
    model, hooks = make_model(tmp_path / "model", "llama"), ["mlp_in.1", "mlp_out.1"]
    extracted = extraction_job(model, tmp_path / "corpus.txt", tmp_path / "acts", n_tokens=600, hooks=hooks)
    extract(extracted)
    read, write = (extracted.folder(hook) for hook in hooks)
    text = f"""
        [data]
        path = "{read}"
        [sae]
        d_sae = 64
        k = 4
        [train]
        batch_size = 64
        n_steps = 12
        [launch]
        gpus = "cpu"
    """
    (tmp_path / "job.toml").write_text(text)
    sae, transcoder = tmp_path / "sae", tmp_path / "transcoder"
    command = ["run", str(tmp_path / "job.toml"), "--out"]
    to_mlp_out = ["--set", f"data.target_path={write}", "--set", "sae.architecture=jumprelu"]
    without_card = ["--set", "train.report_card=false"]
    assert main([*command, str(sae), *without_card]) == main([*command, str(transcoder), *to_mlp_out]) == EXIT_FINISHED
    assert export(sae, tmp_path / "before", "--format", "neuronpedia") == EXIT_USAGE
    assert main(["eval", str(sae), "--device", "cpu"]) == EXIT_FINISHED
    for run, form in ((sae, "neuronpedia"), (transcoder, "circuit-tracer"), (transcoder, "saelens")):
        assert export(run, tmp_path / form, "--format", form) == EXIT_FINISHED
    batch = json.loads((tmp_path / "neuronpedia" / "batch-0.json").read_text())
    assert (batch["layer"], batch["sae_set"]) == (1, "blocks.1.mlp.hook_in")
    assert len(batch["features"][0]["activations"]) > 0
    assert {file.name for file in (tmp_path / "circuit-tracer").iterdir()} == {"config.yaml", "layer_1.safetensors"}
    assert 'feature_output_hook: "hook_mlp_out"' in (tmp_path / "circuit-tracer" / "config.yaml").read_text()
    told = json.loads((tmp_path / "saelens" / "cfg.json").read_text())["metadata"]
    hook_names = {"hook_name": "blocks.1.mlp.hook_in", "hook_name_out": "blocks.1.hook_mlp_out"}
    assert told["as_extracted"] == hook_names
    modules = {"hook_name": "model.layers.1.post_attention_layernorm", "hook_name_out": "model.layers.1.mlp"}
    assert told.items() >= (modules | {"hook_layer": 1, "context_size": 32, "model_name": str(model)}).items()


def test_notes_on_latents_stay_with_a_replaced_sae_and_go_along_with_exports(
    make_run: MakeRun, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run()
    older, newest = sorted((run_dir / "checkpoints").iterdir())
    note(run_dir / "sae", 1, name="first")
    assert export(run_dir, tmp_path / "out") == EXIT_FINISHED
    note(tmp_path / "out", 2, starred=True)
    note(run_dir / "sae", 1, name="second")
    assert export(run_dir, tmp_path / "out", "--force") == EXIT_FINISHED
    assert "keeps 1 note on other latents" in capsys.readouterr().out
    notes = read_notes(tmp_path / "out").by_latent
    assert [(one.latent, one.name, one.tokens) for one in notes.values()] == [(1, "second", 2560), (2, "", 2560)]
    # The SAE of another checkpoint replaces the run's own SAE, and its notes stay.
    assert export(older, run_dir / "sae", "--force") == EXIT_FINISHED
    assert exported_tokens(run_dir / "sae") == 1280
    assert read_notes(run_dir / "sae").by_latent[1].tokens == 2560
    assert export(newest, tmp_path / "set", "--format", "dictionary_learning") == EXIT_FINISHED
    assert read_notes(tmp_path / "set").by_latent[1].name == "second"


def test_labels_of_the_exported_weights_keep_to_them_in_every_format_and_at_import(
    make_run: MakeRun, run_dir: Path, activations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run()
    sae, older = run_dir / "sae", min((run_dir / "checkpoints").iterdir())
    note(sae, 1, weights_of(sae), name="now")
    note(sae, 2, "older", name="before")
    labels = ((1, weights_of(sae)), (2, "older"))
    record(sae, *(Explanation(latent=latent, text="kings", weights=weights) for latent, weights in labels))
    for form in ("saelens", "dictionary_learning", "sparsify"):
        out = tmp_path / form
        assert export(run_dir, out, "--format", form) == EXIT_FINISHED
        assert "1 explanation of other weights not copied" in capsys.readouterr().out
        assert (weights_of(out) == weights_of(sae)) == (form == "saelens")
        # The folder of an export can be replaced.
        assert export(run_dir, out, "--format", form, "--force") == EXIT_FINISHED
        back = tmp_path / f"{form}-back"
        assert main(["import", str(out), "--out", str(back), "--data", str(activations)]) == EXIT_FINISHED
        for folder in (out, back / "sae"):
            assert {one.latent: one.weights for one in read_explanations(folder).values()} == {1: weights_of(folder)}
            notes = read_notes(folder).by_latent
            assert [notes[latent].weights for latent in (1, 2)] == [weights_of(folder), "older"]
        assert notes[1].tokens == exported_tokens(back / "sae")
    assert export(older, tmp_path / "older") == EXIT_FINISHED
    assert not read_explanations(tmp_path / "older")
    assert not read_notes(tmp_path / "older").by_latent[1].is_of(weights_of(tmp_path / "older"), 2560)


def test_notes_that_cannot_be_copied_are_reported_and_the_sae_is_exported(
    make_run: MakeRun, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run()
    (run_dir / "sae" / NOTES).write_text("<<<<<<< HEAD\n")
    assert export(run_dir, tmp_path / "out") == EXIT_FINISHED
    assert f"the notes on latents are not copied: {run_dir / 'sae' / NOTES}, line 1" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"cfg.json", "sae_weights.safetensors"}


def note(folder: Path, latent: int, weights: str = "", **fields: Any) -> None:
    change_note(folder, latent, lambda before: msgspec.structs.replace(before, **fields), weights)
