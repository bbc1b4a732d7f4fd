"""Tests that evaluating a real run reproduces its held-out metrics, and stores the results with the weights."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import make_model, sentences

from trainer.activations.split import Split
from trainer.cli import main
from trainer.contract.runs.features import FEATURES, Features
from trainer.contract.runs.rank_spec import RankSpec, write_spec
from trainer.contract.runs.row_sums import SUMS, read_sums
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.settings.tokens_of_data import may_tell_tokens
from trainer.evaluation import evaluate_run
from trainer.evaluation.command import evaluate
from trainer.training.loop import Trainer

MakeTrainer = Callable[..., Trainer]
MakeJob = Callable[..., JobConfig]


def finished_run(job: JobConfig, make_trainer: MakeTrainer, folder: Path, kept: object) -> Path:
    """Train in this process, and write a run folder's files."""
    assert make_trainer(job, kept, checkpoints=folder / "checkpoints", output=folder / "sae").run()
    (folder / "job.toml").write_text(dump_job(job))
    return folder


def test_a_report_card_matches_the_held_out_fvu_and_is_stored_next_to_the_weights(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(make_job(), make_trainer, tmp_path / "run", kept)
    assert main(["eval", str(run), "--device", "cpu", "--json"]) == 0
    (card,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]
    figures = card["figures"]
    assert figures["n_tokens"] == 150
    assert card["data"]["is_held_out"]
    assert figures["fvu"] == pytest.approx(kept.curve("heldout_fvu")[-1], rel=1e-3)
    assert figures["l0"] == pytest.approx(kept.curve("heldout_l0")[-1], rel=1e-6)
    assert 0 < figures["fvu_error"] < figures["fvu"]
    assert card.pop("written_to") == str(run / "sae")
    # Explanations are read from their own file.
    assert card.pop("explained") is None
    assert json.loads((run / "sae" / "card.json").read_text()) == card
    assert f"{figures['fvu']:.4f}" in (run / "sae" / "README.md").read_text()


def tell_texts(activations: Path, n_rows: int = 25) -> None:
    """Store a text number for each row in both shards. Each text has `n_rows` rows."""
    first = 0
    for file in sorted(activations.glob("*.safetensors")):
        rows = load_file(file)["activations"]
        save_file({"activations": rows, "document": (first + torch.arange(len(rows))) // n_rows}, file)
        first += len(rows)


def card_of(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["eval", str(run), "--device", "cpu", "--contexts", "0", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["cards"][0]


def test_a_report_card_measures_entire_texts_and_stores_per_text_sums_for_comparisons(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path, capsys
) -> None:
    tell_texts(activations)
    run = finished_run(make_job(), make_trainer, tmp_path / "run", kept)
    message = '150 rows are held out: all rows of 6 texts (data.hold_out = "auto")'
    assert ("held_out", "info", message) in kept.events
    card = card_of(run, capsys)
    assert card["figures"]["fvu"] == pytest.approx(kept.curve("heldout_fvu")[-1], rel=1e-3)
    assert (card["figures"]["n_clusters"], card["figures"]["clustered_by"]) == (6, "texts")
    # The zero rows are identical, so 2 of the 150 held-out rows have copies.
    assert (card["data"]["hold_out"], card["data"]["copies"]) == ("texts", 2 / 150)
    assert " over 6 texts, median row" in (run / "sae" / "README.md").read_text()
    sums = read_sums(run / "sae", card["figures"]["fvu"])
    assert sums
    assert len(sums.errors) == 6
    assert (run / "sae" / SUMS).stat().st_mode & 0o777 == 0o600
    assert read_sums(run / "sae", 2 * card["figures"]["fvu"]) is None
    # The sums for two SAEs can be compared only if both SAEs were measured on the same rows.
    for number, (seed, split_seed) in enumerate([(1, 0), (0, 1)]):
        job = make_job(train={"seed": seed}, data={"split_seed": split_seed})
        other = finished_run(job, make_trainer, tmp_path / f"other{number}", kept)
        of_other = read_sums(other / "sae", card_of(other, capsys)["figures"]["fvu"])
        assert of_other
        assert (of_other.rows == sums.rows) == (split_seed == 0)


def test_a_run_from_an_earlier_program_version_is_measured_on_its_own_held_out_rows(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path, capsys
) -> None:
    tell_texts(activations)
    as_before = make_job(train={"seed": 3}, data={"hold_out": "rows", "split_seed": 3})
    trainer = make_trainer(as_before)
    assert trainer.data.split.held_out.tolist() == Split(3000, 150, 3).held_out.tolist()
    run = finished_run(as_before, make_trainer, tmp_path / "run", kept)
    (file := run / "job.toml").write_text(
        "".join(line for line in file.read_text().splitlines(True) if not line.startswith(("hold_out", "split_seed")))
    )
    card = card_of(run, capsys)
    assert card["figures"]["fvu"] == pytest.approx(kept.curve("heldout_fvu")[-1], rel=1e-3)
    assert card["data"]["hold_out"] == "rows"


def test_held_out_rows_that_are_copies_of_training_rows_are_reported(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path, capsys
) -> None:
    x = load_file(activations / "a.safetensors")["activations"][:50]
    save_file({"activations": x.repeat(64, 1)}, activations / "a.safetensors")
    (activations / "b.safetensors").unlink()
    run = finished_run(make_job(train={"n_steps": 5}), make_trainer, tmp_path / "run", kept)
    sentence = "100.0% of the held-out rows have an exact copy among the checked training rows, so the FVU is too low"
    assert any(one[:2] == ("copies", "warning") and one[2].startswith(sentence) for one in kept.events)
    assert card_of(run, capsys)["data"]["copies"] == 1
    assert sentence in (run / "sae" / "README.md").read_text()
    assert main(["inspect", str(activations)]) == 0
    assert sentence in capsys.readouterr().out


def test_a_model_card_contains_no_path_from_this_machine(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path
) -> None:
    meta = {"model_name": str(tmp_path / "models" / "smol"), "dataset_path": str(tmp_path / "corpus.jsonl")}
    (activations / "meta.json").write_text(json.dumps(meta | {"hook_name": "resid_post.3"}))
    run = finished_run(make_job(data={"max_norm": 0}), make_trainer, tmp_path / "run", kept)
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    card = (run / "sae" / "README.md").read_text()
    assert "- model name: smol\n" in card
    assert "- dataset path: corpus.jsonl\n" in card
    assert str(tmp_path) not in card
    assert "rows; no rows are left out because of their norm.\n" in card
    assert "rows with more than" not in card
    figures = json.loads((run / "sae" / "card.json").read_text())["figures"]
    assert figures["rare"] is None
    assert " rows, too few rows to say which are rare, " in card


def test_a_sweep_gets_one_report_card_per_sae_and_keeps_a_user_written_readme(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(sae={"k": [2, 4]}, data={"held_out_tokens": 0})
    run = finished_run(job, make_trainer, tmp_path / "run", kept)
    (run / "sae" / "k=2" / "README.md").write_text("mine")
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "sae k=2: topk" in told
    assert "sae k=4: topk" in told
    assert "training rows" in told
    assert (run / "sae" / "k=2" / "README.md").read_text() == "mine"
    assert (run / "sae" / "k=4" / "card.json").exists()


def test_a_transcoders_report_card_compares_its_output_with_the_targets(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = tmp_path / "targets"
    targets.mkdir()
    save_file({"activations": torch.randn(3000, 12)}, targets / "a.safetensors")
    job = make_job(data={"target_path": str(targets)}, sae={"architecture": "batch_topk"})
    run = finished_run(job, make_trainer, tmp_path / "run", kept)
    assert main(["eval", str(run), "--device", "cpu", "--json"]) == 0
    (card,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]
    assert card["figures"]["fvu"] == pytest.approx(kept.curve("heldout_fvu")[-1], rel=1e-3)


def test_non_finite_rows_and_outliers_are_dropped_and_counted(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path, capsys
) -> None:
    run = finished_run(make_job(data={"held_out_tokens": 0}), make_trainer, tmp_path / "run", kept)
    shard = load_file(activations / "a.safetensors")["activations"]
    shard[5], shard[6] = math.nan, 1000 * shard[6]
    save_file({"activations": shard}, activations / "a.safetensors")
    assert main(["eval", str(run), "--device", "cpu", "--json"]) == 0
    (card,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]
    assert card["data"]["not_finite"] == 1
    assert card["data"]["outlier_fraction"] == pytest.approx(1 / 2999)
    assert card["figures"]["n_tokens"] == 2998
    assert card["figures"]["fvu"] == pytest.approx(kept.curve("fvu")[-1], rel=0.5)


@pytest.mark.parametrize("of_targets", [False, True])
def test_a_report_card_names_dimensions_that_account_for_most_of_the_variance(
    of_targets: bool, make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path, capsys
) -> None:
    heavy = tmp_path / "heavy"
    heavy.mkdir()
    rows = torch.cat([load_file(file)["activations"].float() for file in sorted(activations.iterdir())])
    rows[:, 3] *= 1000
    save_file({"activations": rows}, heavy / "a.safetensors")
    data = {"max_norm": 0.0} | ({"target_path": str(heavy)} if of_targets else {"path": str(heavy)})
    run = finished_run(make_job(data=data, sae={"architecture": "batch_topk"}), make_trainer, tmp_path / "run", kept)
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    told = "1 dimension of 16 (number 3) accounts for 100.0 % of the variance"
    assert told in capsys.readouterr().out
    assert told in (run / "sae" / "README.md").read_text()


def test_dropped_and_scaled_dimensions_are_folded_into_the_export(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path, capsys
) -> None:
    rows = torch.cat([load_file(file)["activations"].float() for file in sorted(activations.iterdir())])
    rows[:, 3], rows[:, 5] = rows[:, 3] * 1000 + 70, rows[:, 5] * 50
    (activations / "b.safetensors").unlink()
    save_file({"activations": rows}, activations / "a.safetensors")
    data = {"drop_dimensions": [3], "scale_dimensions": "auto", "max_norm": 0.0}
    trainer = make_trainer(make_job(data=data, train={"n_steps": 40}), kept, output=tmp_path / "run" / "sae")
    assert trainer.run()
    ((_, level, message),) = [event for event in kept.events if event[0] in ("dimensions", "heavy_dimensions")]
    assert level == "info"
    assert message.startswith(
        "1 dimension of 16 (number 3) left out, 1 dimension of 16 (number 5) scaled down by up to "
    )
    exported = load_file(tmp_path / "run" / "sae" / "sae_weights.safetensors")
    assert not exported["W_enc"][3].any()
    assert not exported["W_dec"][:, 3].any()
    held_out = torch.cat([x for x, _ in trainer.data.of_hook(0).held_out(128)]).double()
    assert float(exported["b_dec"][3]) == pytest.approx(float(rows[:, 3].mean()), rel=0.5)
    # Compute the expected FVU in float64 from the exported tensors, selecting the top k latents of each raw row. Weight
    # the errors by the dimension scales used in training.
    weights = {name: one.double() for name, one in exported.items()}
    pre_acts = (held_out - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
    acts = pre_acts.relu() * (pre_acts >= pre_acts.topk(4, dim=1).values[:, -1:])
    error, spread = held_out - acts @ weights["W_dec"] - weights["b_dec"], held_out - held_out.mean(0)
    scales = trainer.learners[""].sae.dimension_scales.double()
    fvu, of_all = (float((error * s).square().sum() / (spread * s).square().sum()) for s in (scales, 1.0))
    assert kept.curve("heldout_fvu")[-1] == pytest.approx(fvu, rel=1e-3)
    assert of_all > 0.99 > fvu
    (tmp_path / "run" / "job.toml").write_text(dump_job(trainer._job))
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "run" / "checkpoints")
    cards = []
    for place in ("run", "run/sae"):
        assert main(["eval", str(tmp_path / place), "--device", "cpu", "--json"]) == 0
        cards += json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]
    for card in cards:
        assert card["figures"]["fvu"] == pytest.approx(fvu, rel=1e-3)
        assert card["figures"]["fvu_all_dimensions"] == pytest.approx(of_all, rel=1e-3)
        assert card["data"]["dimensions"] == message.partition("; this run's FVU")[0]
    assert "FVU of all dimensions" in (tmp_path / "run" / "sae" / "README.md").read_text()


def test_a_report_card_is_kept_only_next_to_the_weights_it_was_measured_on(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(make_job(train={"checkpoint_every": 10}), make_trainer, tmp_path / "run", kept)
    sae = run / "sae"
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"written to {sae}"
    older = min((run / "checkpoints").iterdir())
    of_newest = (sae / "card.json").read_bytes()
    assert main(["eval", str(older), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"not written: there is an SAE from another checkpoint in {sae}"
    assert (sae / "card.json").read_bytes() == of_newest
    assert main(["export", str(older), "--out", str(sae), "--force"]) == 0
    assert {file.name for file in sae.iterdir()} == {".cards", "cfg.json", "sae_weights.safetensors"}
    assert main(["eval", str(older), "--device", "cpu"]) == 0
    assert (sae / "card.json").exists()


def test_a_launched_jobs_report_card_is_written_next_to_its_sae(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path
) -> None:
    job, run, output = make_job(), tmp_path / "runs" / "1", tmp_path / "saes" / "1"
    run.mkdir(parents=True)
    (run / "job.toml").write_text(dump_job(job))
    assert make_trainer(job, kept, checkpoints=run / "checkpoints", output=output).run()
    write_spec(RankSpec(run, output, attempt=1, world_size=1, device="cpu"))
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    assert (output / "card.json").exists()
    assert not (run / "sae").exists()


def test_a_folder_without_a_run_produces_a_one_sentence_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert "neither a run folder nor a checkpoint" in capsys.readouterr().err


def test_contexts_for_a_streamed_run_are_found_by_rereading_its_text(
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[Path] = []
    extract = evaluate_run.extract

    def noted(job, *others):
        read.append(Path(job.extract.output))
        return extract(job, *others)

    monkeypatch.setattr(evaluate_run, "extract", noted)
    monkeypatch.setitem(evaluate_run.ROWS_READ_AGAIN, "cpu", 600)
    (text := tmp_path / "corpus.txt").write_text("\n\n".join(sentences(600)))
    model = str(make_model(tmp_path / "gpt2", "gpt2"))
    data = {"source": "model", "model": model, "hook": "resid_post.1", "text": str(text), "context": 32}
    data |= {"batch_tokens": 256, "shuffle_tokens": 500, "held_out_tokens": 100}
    sae, train = {"d_sae": 64, "k": [2, 4]}, {"batch_size": 64, "n_steps": 30}
    job, problems = parse_job({"data": data, "sae": sae, "train": train})
    assert job, problems
    folder = tmp_path / "run"
    assert make_trainer(job, checkpoints=folder / "checkpoints", output=folder / "sae").run()
    (folder / "job.toml").write_text(dump_job(job))
    assert may_tell_tokens(job.hooks.values())
    told = evaluate(folder, best=False, device="cpu")
    assert len(told) == 2
    # The text is read once for all SAEs at a hook, and the temporary rows are deleted afterwards.
    assert len(read) == 1
    assert not read[0].exists()
    for one in told:
        features = Features(Path(one["written_to"]) / FEATURES)
        assert features.n_rows == 600
        assert features.order()
        assert features.search("the")
