"""Tests for `sae-tui job --against`, which shows the differences between two report cards."""

from __future__ import annotations

from contextlib import closing

import pytest
from cli.conftest import Shell
from support.report_cards import FIGURES, card_table, put_card
from support.stores import put_store

from trainer.contract.runs.card_versions import archive
from trainer.contract.runs.explanations import Explanation, record
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job


@pytest.fixture(autouse=True)
def jobs(shell: Shell) -> None:
    """Record four jobs: 1 with two report cards, 2 with a sweep's SAEs, 3 without a report card, and 4 a command."""
    shell.data.create()
    put_store(shell.data.control_db, "control")
    with closing(Control(shell.data.control_db)) as control:
        for name, config in zip("abcd", ("", "", "", 'kind = "command"'), strict=True):
            control.create_job(
                Job(name=name, config=config, user="ada", host="here", device="cpu", gpu_source="none", created=0.0)
            )
    put_card(shell.data.sae(1), figures=FIGURES | {"fvu": 0.3})
    archive(shell.data.sae(1))
    put_card(shell.data.sae(1))
    for label in ("k=8", "k=16"):
        put_card(shell.data.sae(2) / label, label=label)


def test_a_report_card_is_compared_with_an_earlier_one(shell: Shell) -> None:
    title, head, fvu, median, *_, note = shell.run("job", 1, "--against", 1).stdout.splitlines()
    assert title == "job 1 card 2 against job 1 card 1"
    assert " ".join(head.split()) == "FIGURE GROUP JOB 1 CARD 2 JOB 1 CARD 1 DIFFERENCE"
    assert " ".join(fvu.split()) == "FVU reconstruction 0.2500 ± 0.0100 0.3000 ± 0.0100 -0.0500 better"
    assert median.split()[-2:] == ["-", "=*"]
    assert note == "* compared by the digits shown, because there is no standard error"
    reverse = shell.run("job", 1, "--card", 1, "--against", 2).stdout.splitlines()
    assert reverse[2].split()[-2:] == ["+0.0500", "worse"]


def test_a_comparison_is_printed_as_json(shell: Shell) -> None:
    (answer,) = shell.json("job", 1, "--against", 1)
    assert (answer["number"], answer["against"]) == (2, {"job": 1, "number": 1, "sae": ""})
    assert answer["figures"][0] == {
        "name": "fvu", "better": "lower", "value": 0.25, "error": 0.01, "against": 0.3, "against_error": 0.01,
        "difference": pytest.approx(-0.05), "verdict": "better", "is_exact": False,
    }  # fmt: skip


def test_a_jobs_only_sae_is_compared_with_each_sae_of_a_sweep(shell: Shell) -> None:
    assert [one["sae"] for one in shell.json("job", 1, "--against", "2:")] == ["k=16", "k=8"]
    assert [one["sae"] for one in shell.json("job", 2, "--against", "1:1")] == ["k=16", "k=8"]
    (both,) = {tuple(one["sae"] == one["against"]["sae"] for one in shell.json("job", 2, "--against", "2:"))}
    assert both == (True, True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--against", "7"], "--against: job 1 has the report cards 1, 2; give one of them"),
        (["--card", "7", "--against", "1"], "--card: job 1 has the report cards 1, 2; give one of them"),
        (["--against", "3:"], "--against: job 3 has no report card; run `sae-tui eval 3`"),
        (["--against", "4:"], "--against: job 4 runs a command and has no SAE"),
        (["--against", "9:1"], "there is no job 9; `sae-tui jobs` lists them"),
    ],
)
def test_a_report_card_that_does_not_exist_is_named(shell: Shell, flags: list[str], said: str) -> None:
    (line,) = shell.errors("job", 1, *flags, code=1)
    assert line == f"sae-tui: error: {said}"


@pytest.mark.parametrize("flags", [["--against", "1:"], ["--card", "1", "--against", "1:"]])
def test_a_flag_is_named_only_if_it_was_given(shell: Shell, flags: list[str]) -> None:
    (line,) = shell.errors("job", 3, *flags, code=1)
    named = "--card: " if "--card" in flags else ""
    assert line == f"sae-tui: error: {named}job 3 has no report card; run `sae-tui eval 3`"


@pytest.mark.parametrize("word", ["x", "0", "1:0", "", ":1"])
def test_a_word_that_names_no_report_card_is_a_usage_error(shell: Shell, word: str) -> None:
    (line,) = shell.errors("job", 1, "--against", word, code=2)
    assert "--against: must be a number of --cards like 2, or 8: or 8:2 for job 8" in line


def test_a_job_with_scaled_dimensions_shows_the_fvu_of_all_dimensions(shell: Shell) -> None:
    data = card_table()["data"] | {"dimensions": "1 dimension of 576 (number 507) scaled down by up to 13.1"}
    put_card(shell.data.sae(3), data=data, figures=FIGURES | {"fvu_all_dimensions": 0.0575})
    text = " ".join(shell.run("job", 3).stdout.split())
    assert "1 dimension of 576 (number 507) scaled down by up to 13.1; FVU of all dimensions 0.0575" in text


def test_the_explanations_of_latents_are_on_the_report_card(shell: Shell) -> None:
    folder = shell.data.sae(1)
    put_card(folder, weights="w")
    record(folder, Explanation(latent=3, text="kings", detection=0.9, detection_error=0.1, model="m", weights="w"))
    line = "explanations 1 of 64 latents described by m; mean detection 0.900 ± 0.100 (chance 0.5)"
    assert line in [" ".join(one.split()) for one in shell.run("job", 1).stdout.splitlines()]
    assert line in [" ".join(one.split()) for one in shell.run("job", 1, "--card", 2).stdout.splitlines()]
    (card,) = shell.json("job", 1)["card"]
    assert (card["explained"]["n_latents"], card["explained"]["detection"]["error"]) == (1, pytest.approx(0.1))
