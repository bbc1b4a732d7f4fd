"""Tests the report cards of SAE folders, measured on the run's held-out rows or, without a run, on given rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.layouts import D_IN as LAYOUTS_WIDTH
from support.layouts import LAYOUTS
from support.report_cards import put_card
from support.saes import made

from trainer.cli import main
from trainer.contract.errors import UserError
from trainer.contract.runs.card_versions import KS, weights_of
from trainer.contract.runs.rank_spec import EXIT_USAGE
from trainer.contract.runs.report_card import read_card
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job
from trainer.evaluation import stability
from trainer.evaluation.exported import ExportedSae
from trainer.sharing.base import SharedSae, shared_form
from trainer.sharing.dictionary_learning import DictionaryLearning
from trainer.sharing.saelens import SaeLens, export_sae
from trainer.training.loop import Trainer
from trainer.training.thresholds import OF_HALVES

MakeTrainer = Callable[..., Trainer]
MakeJob = Callable[..., JobConfig]
Shown = pytest.CaptureFixture[str]


def cards(capsys: Shown, *arguments: str) -> list[dict]:
    assert main(["eval", *arguments, "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]


@pytest.mark.parametrize("is_launched", [True, False])
def test_an_sae_next_to_its_run_is_measured_on_the_runs_held_out_rows(
    is_launched: bool,
    make_job: MakeJob,
    make_trainer: MakeTrainer,
    kept,
    activations: Path,
    tmp_path: Path,
    capsys: Shown,
) -> None:
    run = tmp_path / "runs" / "7" if is_launched else tmp_path / "run"
    output = tmp_path / "saes" / "7" if is_launched else run / "sae"
    job = make_job(sae={"k": [2, 4]})
    assert make_trainer(job, kept, checkpoints=run / "checkpoints", output=output).run()
    (run / "job.toml").write_text(dump_job(job))
    both = cards(capsys, str(output))
    (one,) = cards(capsys, str(output / "k=2"))
    assert [card["written_to"] for card in both] == [str(output / "k=2"), str(output / "k=4")]
    assert one["figures"] == both[0]["figures"]
    assert one["data"]["is_held_out"]
    assert one["figures"]["fvu"] == pytest.approx(kept.curve("heldout_fvu@k=2")[-1], rel=1e-3)
    # The same rows stay held out after rows are added to the data.
    save_file({"activations": torch.randn(1000, 16)}, activations / "c.safetensors")
    (later,) = cards(capsys, str(output / "k=2"))
    assert later["figures"] == one["figures"]


@pytest.fixture
def alone(make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path) -> str:
    assert make_trainer(make_job()).run()
    return str(shutil.copytree(tmp_path / "sae", tmp_path / "mine"))


def test_an_sae_without_a_run_is_measured_on_the_given_rows(alone: str, activations: Path, capsys: Shown) -> None:
    (card,) = cards(capsys, alone, "--data", str(activations))
    assert (card["name"], card["figures"]["n_tokens"]) == ("mine", 3000)
    assert not card["data"]["is_held_out"]
    assert not card["data"]["is_trained_on"]
    assert "3,000 rows" in (Path(alone) / "README.md").read_text()


@torch.no_grad()
def test_a_transcoder_without_a_run_is_measured_on_the_given_targets(
    alone: str, activations: Path, tmp_path: Path, capsys: Shown
) -> None:
    torch.manual_seed(0)
    sae = made("jumprelu", 32, skip=True)
    export_sae(sae, theirs := tmp_path / "transcoder", {})
    x, y = torch.randn(300, 32), torch.randn(300, 32) * 2 + 1
    for name, rows in (("inputs", x), ("targets", y)):
        (tmp_path / name).mkdir()
        save_file({"activations": rows}, tmp_path / name / "a.safetensors")
    inputs, targets = str(tmp_path / "inputs"), str(tmp_path / "targets")
    (card,) = cards(capsys, str(theirs), "--data", inputs, "--targets", targets)
    output = sae(x, y)
    fvu = float((output.x_hat - y).square().sum() / (y - y.mean(0)).square().sum())
    assert card["figures"]["fvu"] == pytest.approx(fvu, rel=1e-4)
    assert card["figures"]["l0"] == pytest.approx(float((output.acts.dense() > 0).sum()) / 300)
    # Although inputs and targets have the same width, inputs are never used as targets.
    (theirs / "card.json").unlink()
    for arguments, reason in (
        ([str(theirs), "--data", inputs], f"--targets: is required, since {theirs} is a transcoder; "),
        ([alone, "--data", str(activations), "--targets", str(activations)], "mine is not a transcoder"),
        ([str(theirs), "--targets", targets], "--targets: needs --data"),
        ([alone, "--transcoder"], "--transcoder: needs --data"),
        ([str(theirs), "--data", inputs, "--targets", "none"], "data.target_path"),
    ):
        assert main(["eval", *arguments, "--device", "cpu"]) == 2
        assert reason in capsys.readouterr().err
    assert not (theirs / "card.json").exists()


@pytest.mark.parametrize(
    "name",
    ["saelens 5: rows scaled to a mean norm", "sparsify 2024: skip transcoder without a mark", "gemma-scope 1: res"],
)
@torch.no_grad()
def test_an_sae_from_another_tool_can_be_measured_once_its_missing_settings_are_given(
    name: str, tmp_path: Path, capsys: Shown
) -> None:
    torch.manual_seed(0)
    layout = LAYOUTS[name]
    reference = layout.write(tmp_path)
    x, y = torch.randn(200, LAYOUTS_WIDTH) * 2, torch.randn(200, LAYOUTS_WIDTH) * 3
    for place, rows in (("inputs", x), ("targets", y)):
        (tmp_path / place).mkdir()
        save_file({"activations": rows}, tmp_path / place / "a.safetensors")
    is_transcoder = "--transcoder" in layout.flags
    flags = [word for flag in layout.flags for word in (["--config", flag] if "=" in flag else [flag])]
    flags += ["--targets", str(tmp_path / "targets")] if is_transcoder else []
    (card,) = cards(capsys, str(tmp_path / layout.place), "--data", str(tmp_path / "inputs"), *flags)
    target, x_hat = (y if is_transcoder else x).double(), reference(x)[1]
    fvu = float((x_hat - target).square().sum() / (target - target.mean(0)).square().sum())
    assert card["figures"]["fvu"] == pytest.approx(fvu, rel=1e-3)


def test_rows_from_a_different_hook_produce_a_warning(
    make_job: MakeJob, make_trainer: MakeTrainer, activations: Path, tmp_path: Path, capsys: Shown
) -> None:
    def is_of(hook: str) -> None:
        (activations / "meta.json").write_text(json.dumps({"hook_name": hook}))

    is_of("blocks.3.hook_resid_post")
    assert make_trainer(make_job()).run()
    sae = str(shutil.copytree(tmp_path / "sae", tmp_path / "mine"))
    for hook in ("blocks.3.hook_resid_post", "resid_post.3"):
        is_of(hook)
        cards(capsys, sae, "--data", str(activations))
        assert capsys.readouterr().err == ""
    is_of("resid_post.4")
    assert main(["eval", sae, "--data", str(activations), "--device", "cpu"]) == 0
    wanted = "warning: according to the SAE, its hook is blocks.3.hook_resid_post, but the rows are from resid_post.4\n"
    assert capsys.readouterr().err == wanted
    assert main(["import", sae, "--data", str(activations), "--out", str(tmp_path / "run")]) == 0
    assert "note: according to the SAE, its hook is blocks.3.hook_resid_post, but " in capsys.readouterr().out


def test_missing_rows_and_rows_with_a_different_width_are_refused(alone: str, tmp_path: Path, capsys: Shown) -> None:
    assert main(["eval", alone]) == 2
    assert "does not belong to a run; give a folder of activations to measure on" in capsys.readouterr().err
    assert main(["eval", alone, "--best", "--data", "x"]) == 2
    assert "--best: requires the folder of a run" in capsys.readouterr().err
    assert main(["eval", alone, "--data", str(tmp_path / "none")]) == 2
    assert "data.path" in capsys.readouterr().err
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    save_file({"activations": torch.randn(50, 12)}, narrow / "a.safetensors")
    assert main(["eval", alone, "--data", str(narrow)]) == 1
    assert "maps 16 to 16 dimensions" in capsys.readouterr().err
    assert main(["eval", str(Path(alone) / "cfg.json"), "--data", "x"]) == 2
    assert "cfg.json is a file, but an SAE needs a folder for its report card; give a folder" in capsys.readouterr().err
    (deep := tmp_path / "deep" / "layers").mkdir(parents=True)
    shutil.copytree(alone, deep / "3")
    assert main(["eval", str(tmp_path / "deep"), "--data", "x"]) == 2
    assert "deep contains an SAE in layers/3; give the path of one" in capsys.readouterr().err
    (deep / "3" / "sae_weights.safetensors").rename(tmp_path / "weights")
    (deep / "3" / "sae_weights.safetensors").symlink_to(tmp_path / "weights")
    assert main(["eval", str(deep / "3"), "--data", "x"]) == 2
    refusal = "contains no SAE: sae_weights.safetensors is a symbolic link, and symbolic links are not followed"
    assert refusal in capsys.readouterr().err
    assert not (Path(alone) / "card.json").exists()


def test_a_report_card_is_written_next_to_a_dictionary_learning_sae(
    alone: str, activations: Path, tmp_path: Path, capsys: Shown
) -> None:
    reader, writer = SaeLens(), DictionaryLearning()
    writer.write(reader.read(Path(alone)), tmp_path / "theirs")
    for folder in ("mine", "theirs"):
        (tmp_path / folder / "README.md").unlink(missing_ok=True)
    of_both = [cards(capsys, str(tmp_path / name), "--data", str(activations))[0] for name in ("mine", "theirs")]
    assert of_both[1]["figures"]["fvu"] == pytest.approx(of_both[0]["figures"]["fvu"], rel=1e-5)
    assert of_both[1]["weights"] != of_both[0]["weights"]
    assert read_card(tmp_path / "theirs")


def test_malformed_thresholds_for_the_held_out_halves_are_ignored(tmp_path: Path) -> None:
    sae = made("batch_topk")
    for stated, used in (([0.5, 2.0], 2.0), ([None, "x"], None), ([0.5, float("nan")], None), ([0.5, {}], None)):
        shared = shared_form(sae, {OF_HALVES: stated})
        whole = shared.weights["threshold"].clone()
        exported = ExportedSae(shared, torch.device("cpu"))
        with exported.measuring_half(1):
            expected = whole if used is None else torch.full_like(whole, used)
            assert torch.equal(exported._weights["threshold"], expected)


def test_untrusted_text_is_escaped_in_the_model_card(
    alone: str, activations: Path, tmp_path: Path, capsys: Shown
) -> None:
    config = json.loads((Path(alone) / "cfg.json").read_text())
    config["metadata"] |= {"training_architecture": "x\n\n# <b>no", "model_name": "[m](http://x)", "hook_name": "<i>|"}
    (Path(alone) / "cfg.json").write_text(json.dumps(config))
    cards(capsys, alone, "--data", str(activations))
    text = (Path(alone) / "README.md").read_text()
    assert "\nx\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\\# \\<b\\>no, 16 dimensions" in text
    assert "- model name: \\[m\\](http://x)\n- hook name: \\<i\\>\\|\n" in text


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model", "auto"), "--model: requires the folder of a run, but "),
        (("--contexts", "5"), "--contexts: requires the folder of a run, but "),
        (("--best",), "--best: requires the folder of a run, but "),
        (("--tokens", "64"), "--tokens: requires --model; add --model, or leave out --tokens"),
    ],
)
def test_flags_that_do_not_apply_to_an_sae_without_a_run_are_refused(
    alone: str, activations: Path, capsys: Shown, flags: tuple[str, ...], reason: str
) -> None:
    assert main(["eval", alone, "--data", str(activations), *flags]) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(reason)
    assert not (Path(alone) / "card.json").exists()


def test_saes_with_different_seeds_are_compared_even_without_a_run(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path, capsys: Shown
) -> None:
    job = make_job(train={"seed": [0, 1], "random_twin": True})
    assert make_trainer(job, kept, output=tmp_path / "run" / "sae").run()
    alone = shutil.copytree(tmp_path / "run" / "sae", tmp_path / "alone")
    found = {card["label"]: card for card in cards(capsys, str(alone), "--data", str(activations))}
    assert found["freeze=off,seed=0"]["stability"]["others"] == ["freeze=off,seed=1"]
    assert found["freeze=off,seed=1"]["twins"][0]["label"] == "freeze=decoder,seed=1"
    assert read_card(alone / "freeze=off,seed=0").stability is not None


def test_cosines_over_seeds_are_shown_even_if_activations_cannot_be_correlated(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path, capsys: Shown,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert make_trainer(make_job(train={"seed": [0, 1]}), kept).run()

    def vanish(*_: object) -> None:
        raise UserError("the rows are gone")

    monkeypatch.setattr(stability, "firing_correlations", vanish)
    for card in cards(capsys, str(tmp_path / "sae"), "--data", str(activations)):
        assert card["stability"]["share"] is not None
        assert card["stability"]["firing_correlation"] is None


def test_renamed_saes_are_compared_if_their_metadata_differ_only_in_the_seed(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path, capsys: Shown
) -> None:
    job = make_job(train={"seed": [0, 1, 2]})
    assert make_trainer(job, kept, output=tmp_path / "seeds").run()
    assert make_trainer(make_job(train={"seed": 3, "lr": 1e-3}), kept, output=tmp_path / "other").run()
    fixed = make_job(train={"seed": [0, 1]}, sae={"architecture": "standard", "k": 4, "sparsity_coefficient": 0.1})
    assert make_trainer(fixed, kept, output=tmp_path / "fixed").run()
    alone = tmp_path / "alone"
    names = {"first": "seeds/seed=0", "second": "seeds/seed=1", "third": "seeds/seed=2", "third-again": "seeds/seed=2"}
    names |= {"lr": "other", "fixed-0": "fixed/seed=0", "fixed-1": "fixed/seed=1"}
    for name, place in names.items():
        shutil.copytree(tmp_path / place, alone / name)
    found = {card["label"]: card["stability"] for card in cards(capsys, str(alone), "--data", str(activations))}
    compared = {label: sorted(one["others"]) for label, one in found.items() if one}
    assert compared == {"first": ["second", "third"], "second": ["first", "third"], "third": ["first", "second"]}
    named = {card["label"]: card for card in cards(capsys, str(tmp_path / "seeds"), "--data", str(activations))}
    for label, own in (("seed=0", found["first"]), ("seed=1", found["second"]), ("seed=2", found["third"])):
        assert own | {"others": None} == named[label]["stability"] | {"others": None}


@pytest.mark.parametrize("names_hook", [False, True])
def test_saes_of_other_layers_with_the_same_recipe_are_not_seeds_of_each_other(
    make_job: MakeJob, make_trainer: MakeTrainer, activations: Path, tmp_path: Path, capsys: Shown, names_hook: bool
) -> None:
    shutil.copytree(activations, other := tmp_path / "other")
    for layer, folder in enumerate((activations, other)):
        if names_hook:
            (folder / "meta.json").write_text(json.dumps({"hook_name": f"resid_post.{layer}"}))
    for file in () if names_hook else other.glob("*.safetensors"):
        save_file({"activations": load_file(file)["activations"] * 2}, file)
    for seed, data in enumerate((activations, other)):
        job = make_job(data={"path": str(data)}, train={"seed": seed})
        for folder in ("renamed/a", "named/seed="):
            assert make_trainer(job, output=tmp_path / f"{folder}{seed}").run()
    for folder in ("renamed", "named"):
        found = cards(capsys, str(tmp_path / folder), "--data", str(activations))
        assert [card["stability"] for card in found] == [None, None]


def test_an_sae_for_several_k_reports_the_same_fvu_at_each_k_as_an_export_with_that_k(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path, capsys: Shown
) -> None:
    run = tmp_path / "run"
    job = make_job(sae={"architecture": "hierarchical_topk", "k": 9, "n_levels": 3})
    assert make_trainer(job, kept, checkpoints=run / "checkpoints", output=run / "sae").run()
    (run / "job.toml").write_text(dump_job(job))
    (of_run,), (of_folder,) = cards(capsys, str(run)), cards(capsys, str(run / "sae"))
    for card in (of_run, of_folder):
        at = card["figures"]["by_k"]
        assert [one["k"] for one in at] == [2, 4, 9]
        assert at[0]["fvu"] > at[1]["fvu"] > at[2]["fvu"] == pytest.approx(card["figures"]["fvu"])
    config = run / "sae" / "cfg.json"
    for at in of_run["figures"]["by_k"]:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"k": at["k"]}))
        (alone,) = cards(capsys, str(run / "sae"))
        assert alone["figures"]["fvu"] == pytest.approx(at["fvu"], rel=1e-4)
        assert alone["figures"]["fvu_error"] == pytest.approx(at["fvu_error"], rel=1e-3)
        assert alone["figures"]["l0"] <= at["k"]
    text = (run / "sae" / "README.md").read_text()
    assert "| FVU by k | 2: " in text


def test_rows_are_encoded_once_for_all_values_of_k(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    metadata = {KS: [1, 3, 8]}
    config = {"architecture": "topk", "k": 8}
    weights = {
        "W_enc": torch.randn(6, 20),
        "W_dec": torch.randn(20, 6),
        "b_enc": torch.randn(20),
        "b_dec": torch.randn(6),
    }
    sae = ExportedSae(SharedSae(config, weights, metadata, k=8), torch.device("cpu"))
    n_products, product = 0, ExportedSae._product

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal n_products
        n_products += 1
        return product(*arguments)

    monkeypatch.setattr(ExportedSae, "_product", counted)
    x = torch.randn(50, 6)
    acts, x_hats = sae.reconstruct_with_each_k(x)
    assert n_products == 1
    torch.testing.assert_close(acts.values, sae.encode(x).values)
    for k, x_hat in zip((1, 3, 8), x_hats, strict=True):
        largest = acts.values.topk(k, dim=1)
        alone = torch.zeros_like(acts.values).scatter(1, largest.indices, largest.values)
        torch.testing.assert_close(x_hat, alone @ weights["W_dec"] + weights["b_dec"])


def test_figures_at_one_k_are_not_kept_on_the_card_of_another_k(
    make_job: MakeJob, make_trainer: MakeTrainer, activations: Path, tmp_path: Path, capsys: Shown
) -> None:
    job = make_job(sae={"architecture": "hierarchical_topk", "k": 8, "n_levels": 3})
    run = tmp_path / "run"
    assert make_trainer(job, checkpoints=run / "checkpoints", output=run / "sae").run()
    (run / "job.toml").write_text(dump_job(job))
    out = tmp_path / "out"
    assert main(["export", str(run), "--out", str(out)]) == 0
    probing = {"n_sets": 1, "n_seeds": 1, "n_texts": 9, "k": {}, "dense": {"auc": 0.9, "of_sets": {}}}
    put_card(out, probing=probing, weights=weights_of(out), spliced=None)
    assert main(["export", str(run), "--out", str(out), "--k", "2", "--force"]) == 0
    (card,) = cards(capsys, str(out), "--data", str(activations))
    assert (card["figures"]["l0"], card["probing"]) == (2, None)
    assert main(["export", str(run), "--out", str(out), "--force"]) == 0
    (card,) = cards(capsys, str(out), "--data", str(activations))
    assert card["probing"]["dense"]["auc"] == 0.9


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ([1.5, "2", None, -3, 10**30, True, 3, 3], [3, 8]),
        (7, []),
        ({"a": 1}, []),
        (list(range(1, 500)), list(range(1, 9))),
    ],
)
def test_odd_values_of_k_in_a_foreign_file_are_ignored(
    stated: object,
    expected: list[int],
    make_job: MakeJob,
    make_trainer: MakeTrainer,
    activations: Path,
    tmp_path: Path,
    capsys: Shown,
) -> None:
    assert make_trainer(make_job(sae={"architecture": "hierarchical_topk", "k": 8})).run()
    config = tmp_path / "sae" / "cfg.json"
    table = json.loads(config.read_text())
    table["metadata"]["trained_for_k"] = stated
    config.write_text(json.dumps(table))
    few = tmp_path / "few"
    few.mkdir()
    # Three rows from one text have no standard error.
    save_file({"activations": torch.randn(3, 16)}, few / "a.safetensors")
    (card,) = cards(capsys, str(tmp_path / "sae"), "--data", str(few))
    ks = [one["k"] for one in card["figures"]["by_k"]]
    assert ks == expected
    assert read_card(tmp_path / "sae") is not None


def test_a_card_shows_the_figures_of_refined_activations_only_if_asked(
    make_job: MakeJob, make_trainer: MakeTrainer, activations: Path, tmp_path: Path, capsys: Shown
) -> None:
    run, folder = tmp_path / "run", tmp_path / "run" / "sae"
    job = make_job()
    assert make_trainer(job, checkpoints=run / "checkpoints", output=folder).run()
    (run / "job.toml").write_text(dump_job(job))
    (plain,) = cards(capsys, str(run), "--contexts", "0")
    assert plain["figures"]["refined"] is None
    assert "refined" not in (folder / "README.md").read_text()
    (of_run,), (of_folder,) = cards(capsys, str(run), "--refine", "2"), cards(capsys, str(folder), "--refine", "2")
    for card in (of_run, of_folder):
        refined = card["figures"]["refined"]
        assert refined["n_steps"] == 2
        assert refined["fvu"] < card["figures"]["fvu"] == pytest.approx(plain["figures"]["fvu"], rel=1e-4)
        assert refined["l0"] <= card["figures"]["l0"]
        assert refined["fvu"] == pytest.approx(of_run["figures"]["refined"]["fvu"], rel=1e-3)
    assert "| FVU, refined | 0." in (folder / "README.md").read_text()
    # A later evaluation on the same rows keeps these figures, and an export does not contain them.
    (later,) = cards(capsys, str(run), "--contexts", "0")
    assert later["figures"]["refined"] == of_folder["figures"]["refined"]
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    assert "refined" not in (tmp_path / "out" / "cfg.json").read_text()


@torch.no_grad()
def test_the_refinement_of_a_transcoder_and_without_rows_is_refused(
    alone: str, activations: Path, tmp_path: Path, capsys: Shown
) -> None:
    export_sae(made("jumprelu", 16), transcoder := tmp_path / "transcoder", {})
    data = ("--data", str(activations), "--device", "cpu", "--refine", "1")
    assert main(["eval", str(transcoder), *data, "--targets", str(activations)]) != 0
    assert capsys.readouterr().err.startswith("--refine: must be 0 for a transcoder")
    assert main(["eval", alone, *data, "--keep-rows"]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("--refine: is measured on rows; leave out --keep-rows")
