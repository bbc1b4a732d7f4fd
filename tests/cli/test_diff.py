"""Tests for `diff`, which trains a crosscoder on two language models."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from support.tiny_models import make_model, sentences


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "gpt2", "gpt2")
    shutil.copytree(folder / "gpt2", folder / "tuned")
    return [folder / "gpt2", folder / "tuned"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(1500)))
    return file


def arguments(models: list[Path], text: Path) -> list[object]:
    return ["diff", *models, "--hook", "resid_post.1", "--text", text, "--gpus", "cpu", "--set", "data.context=32"]


def test_a_dry_run_prints_the_job_file_and_launches_nothing(shell, models: list[Path], text: Path) -> None:
    given = arguments(models, text)
    job = tomllib.loads(shell.run(*given, "--k", 4, "--d-sae", 64, "--tokens", "1M", "--dry-run").stdout)
    assert job["data"]["model"] == [str(one) for one in models]
    assert (job["name"], job["sae"]["architecture"], job["sae"]["k"]) == ("gpt2 vs tuned", "batch_topk", 4)
    assert (job["sae"]["d_sae"], job["train"]["n_tokens"]) == (64, 1_000_000)
    settings = shell.json(*given, "--dry-run")["settings"]
    # By default, a small file is not read beyond its end.
    assert settings["train"]["n_tokens"] == text.stat().st_size // 8
    assert shell.json("jobs") == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["--k", "0"], "--k: must be an integer of at least 1"),
        (["--tokens", "many"], '--tokens: must be a number like 20M, not "many"'),
        (["--hook", "resid_post.9"], "--hook: "),
        (["--text", "/nowhere.txt"], "--text: there is nothing at /nowhere.txt"),
        (["--dataset", "some/texts"], "--dataset"),
        (["--set", "sae.k=[2, 4]"], "--set: gives several SAEs, but diff trains one"),
    ],
)
def test_wrong_flags_are_refused_by_name(
    changes: list[str], sentence: str, shell, models: list[Path], text: Path
) -> None:
    done = shell.run(*arguments(models, text), *changes, code=2)
    assert sentence in done.stderr
    assert shell.json("jobs") == []


def test_a_model_is_not_compared_with_itself(shell, models: list[Path], text: Path) -> None:
    done = shell.run(*arguments([models[0]] * 2, text), code=2)
    assert f"MODEL: names {models[0]} twice; name different models" in done.stderr


@pytest.mark.slow
def test_two_models_are_compared_in_one_command(shell, models: list[Path], text: Path) -> None:
    given = [*arguments(models, text), "--k", 4, "--d-sae", 64, "--tokens", "4k", "--set", "data.held_out_tokens=200"]
    done = shell.run(*given, "--set", "train.batch_size=256")
    assert f"A is {models[0]}, B is {models[1]}" in done.stdout
    assert "`sae-tui features 1 --search part:B` lists the latents that write only in B" in done.stdout
    (job,) = shell.json("jobs")
    assert (job["name"], job["state"], job["tags"]) == ("gpt2 vs tuned", "finished", ["diff"])
