"""Tests for `sae-tui eval`, in which real processes evaluate an SAE on the sample activations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli.conftest import Shell

SAMPLE = Path(__file__).parents[2] / "data" / "sample"
SMALL = ["--set", "sae.d_sae=96", "--set", "sae.k=8", "--set", "train.n_steps=5", "--set", "train.batch_size=256"]


@pytest.mark.slow
def test_evaluating_a_job_writes_its_report_card_and_features(shell: Shell) -> None:
    shell.run("launch", shell.job_file, "--set", f"data.path={SAMPLE}", *SMALL, "--gpus", "cpu", "--wait")
    # The run collects the features when it ends.
    assert shell.json("features", 1, "--limit", 1)
    told = shell.json("eval", 1, "--wait")["message"]
    assert told.startswith("job 1 was evaluated: FVU 0.")
    assert told.endswith("held-out rows; f, or `sae-tui features 1`, shows its latents")
    (strongest,) = shell.json("features", 1, "--limit", 1)
    assert len(strongest["contexts"][0]["tokens"]) > 1
    assert [event["kind"] for event in shell.json("job", 1)["events"]][-2:] == ["evaluating", "evaluated"]
    # No extraction on this machine wrote these activations.
    failed = shell.run("eval", 1, "--model", "auto", "--wait", code=1)
    assert failed.stdout.startswith("job 1 was not evaluated: --model: no extraction wrote")


@pytest.mark.slow
def test_the_job_command_shows_the_report_card(shell: Shell) -> None:
    sweep = ["--set", "sae.k=[4,8]"]
    for more in ([], sweep):
        shell.run("launch", shell.job_file, "--set", f"data.path={SAMPLE}", *SMALL, *more, "--gpus", "cpu", "--wait")
    (card,) = shell.json("job", 1)["card"]
    assert (card["sae"], card["figures"]["d_sae"], card["figures"]["rare"], card["spliced"]) == ("", 96, None, None)
    text = shell.run("job", 1).stdout
    assert f"\nReport card, on {card['figures']['n_tokens']} held-out rows (texts not used in training) of " in text
    assert re.search(f"\nFVU +{card['figures']['fvu']:.4f} ± ", text)
    assert [one["sae"] for one in shell.json("job", 2)["card"]] == ["k=4", "k=8"]
    assert "\nk=8  FVU 0." in shell.run("job", 2).stdout
    shell.run("launch", shell.job_file, "--gpus", "cpu", "--hold")
    assert shell.json("job", 3)["card"] == []
    assert "Report card" not in shell.run("job", 3).stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--probe"], "--probe: needs --model"),
        (["--effects"], "--effects: needs --model"),
        (["--model", "auto", "--no-splice"], "--no-splice: needs --probe or --effects"),
        (["--keep-rows"], "--keep-rows: leaves nothing to measure"),
    ],
)
def test_a_flag_that_needs_another_one_is_a_usage_error(shell: Shell, flags: list[str], said: str) -> None:
    (line,) = shell.errors("eval", 9, *flags, code=2)
    assert line.startswith(f"sae-tui: error: {said}")
    assert shell.json("eval", 9, *flags, code=2)["error"]["field"] == said.partition(":")[0]


def test_a_job_that_cannot_be_evaluated_is_reported_in_one_line(shell: Shell) -> None:
    (line,) = shell.errors("eval", 9, code=1)
    assert line == "sae-tui: error: there is no job 9; `sae-tui jobs` lists them"
    shell.run("launch", shell.job_file, "--gpus", "cpu", "--hold")
    (line,) = shell.errors("eval", 1, code=1)
    assert line == "sae-tui: error: job 1 is held; it can be evaluated once it has ended"
