"""Tests for `arena`, which trains recipes on synthetic data and compares them by the features they find."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from support.report_cards import FIGURES, put_card

from sae_tui.cli_commands.arena import DATA
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

RECIPE = """
name = "small"
[data]
path = "/does/not/exist"
[sae]
d_sae = 64
k = 12
[train]
n_steps = 30
batch_size = 256
[launch]
gpus = "cpu"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (file := tmp_path / "small.toml").write_text(RECIPE)
    return file


@pytest.mark.slow
def test_recipes_are_trained_on_the_same_data_with_several_seeds_and_ranked_by_f1(shell, recipe: Path) -> None:
    wide = recipe.with_name("wide.toml")
    wide.write_text(RECIPE.replace("small", "wide").replace("d_sae = 64", "d_sae = 256"))
    answer = shell.json("arena", recipe, wide, "--seeds", 2)["recipes"]
    assert {(one["id"], one["recipe"], one["seeds"]) for one in answer} == {(1, "small", 2), (2, "wide", 2)}
    f1 = [one["f1"]["mean"] for one in answer]
    assert f1 == sorted(f1, reverse=True)
    assert all(one["f1"]["sd"] > 0 and 0 < one["precision"]["mean"] <= 1 for one in answer)
    assert answer[0]["true_l0"] == answer[1]["true_l0"] == pytest.approx(DATA["active"], rel=0.1)
    text = shell.run("arena", 1, 2).stdout
    assert text.splitlines()[0].split()[:3] == ["RECIPE", "F1", "PRECISION"]
    assert "mean ± s.d. over 2 seeds; 12." in text
    with closing(Control(shell.data.control_db, readonly=True)) as control:
        assert control.job(1).tags == ("arena",)


KNOWN = {"n_features": 80, "n_rows": 8192, "true_l0": 12.0, "precision": 0.5, "recall": 0.6}


def finished(shell, name: str, f1s: list[float], state: JobState = JobState.FINISHED, **more: object) -> int:
    """Record an ended job with one SAE per F1 score; the SAEs differ only in their seeds."""
    shell.data.create()
    with closing(Control(shell.data.control_db)) as control:
        job = Job(name=name, config="", user="me", host="here", device="cpu", gpu_source="none")
        job_id = control.create_job(job)
        assert control.transition(job_id, JobState.STARTING, started=1000.0)
        assert control.transition(job_id, JobState.RUNNING)
        assert control.transition(job_id, state, ended=1090.0)
    for seed, f1 in enumerate(f1s):
        put_card(shell.data.sae(job_id) / f"seed={seed}", label=f"seed={seed}", known=KNOWN | {"f1": f1} | more)
    return job_id


def test_a_recipe_within_two_standard_errors_of_the_best_one_is_called_the_same(shell) -> None:
    finished(shell, "worst", [0.30, 0.32, 0.31])
    finished(shell, "good", [0.60, 0.66, 0.63])
    finished(shell, "best", [0.62, 0.68, 0.65])
    answer = shell.json("arena", 1, 2, 3)["recipes"]
    assert [(one["recipe"], one["same_as_best"]) for one in answer] == [
        ("best", True),
        ("good", True),
        ("worst", False),
    ]
    assert answer[0]["f1"] == {"mean": pytest.approx(0.65), "sd": pytest.approx(0.03)}
    assert answer[0]["mcc"] == {"mean": None, "sd": None}
    lines = shell.run("arena", 1, 2, 3).stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["best", "same"], ["good", "same"], ["worst", "0.310"]]
    assert lines[-1].startswith("mean ± s.d. over 3 seeds; same: the F1 is within two standard errors")
    assert "best ★" in shell.run("arena", 1, 3).stdout


def test_saes_of_other_widths_or_data_are_never_called_the_same(shell) -> None:
    finished(shell, "first", [0.60, 0.61])
    finished(shell, "other data", [0.60, 0.61], data="other")
    put_card(shell.data.sae(finished(shell, "narrow", [])), figures=FIGURES | {"d_sae": 8}, known=KNOWN | {"f1": 0.9})
    rows = shell.json("arena", 1, 1, 2, 3)["recipes"]
    assert [(one["recipe"], one["d_sae"], one["same_as_best"]) for one in rows] == [
        ("narrow", 8, True),
        ("first", 64, False),
        ("other data", 64, False),
    ]
    text = shell.run("arena", 1, 2, 3).stdout
    assert "★" not in text
    assert (
        "F1 favours narrow SAEs: compare it only at the same D_SAE; the recipes were trained on different data" in text
    )


def test_a_failed_job_is_named_and_its_exit_code_is_returned(shell) -> None:
    finished(shell, "good", [0.6])
    finished(shell, "bad", [], state=JobState.FAILED)
    done = shell.run("arena", 1, 2, code=4)
    assert "job 2 failed: it is not in the table" in done.stderr
    assert done.stdout.splitlines()[1].split()[0] == "good"


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        (
            'target_path = "/nowhere/too"',
            "the arena compares SAEs; leave out data.target_path, which makes a transcoder",
        ),
        ('source = "synthetic"\nheld_out_tokens = 0', "data.held_out_tokens is 0, but the arena needs a report card"),
    ],
)
def test_a_recipe_that_would_get_no_figures_is_refused_before_it_is_trained(
    shell, recipe: Path, line: str, refusal: str
) -> None:
    recipe.write_text(RECIPE.replace('path = "/does/not/exist"', line if "source" in line else f'path = "x"\n{line}'))
    (said,) = shell.errors("arena", recipe, code=1)
    assert refusal in said
    assert shell.json("jobs") == []


def test_random_twins_and_recipes_with_one_seed_get_rows_too(shell) -> None:
    finished(shell, "one", [0.5], f1_error=0.01)
    put_card(
        shell.data.sae(1) / "freeze=decoder", label="freeze=decoder", known={"n_features": 80, "n_rows": 9, "f1": 0.1}
    )
    rows = shell.json("arena", 1)["recipes"]
    assert [(one["recipe"], one["seeds"], one["f1"]["sd"]) for one in rows] == [
        ("one", 1, None),
        ("one freeze=decoder", 1, None),
    ]


def test_a_job_without_known_features_and_other_kinds_of_jobs_are_refused_by_name(shell, tmp_path: Path) -> None:
    (file := tmp_path / "run.toml").write_text('kind = "command"\nname = "x"\n[command]\nargv = ["true"]\n')
    (line,) = shell.errors("arena", file, "--allow-code", code=1)
    assert 'run.toml: the arena compares training jobs, and this one has kind = "command"' in line
    (line,) = shell.errors("arena", 5, code=1)
    assert "5" in line
    put_card(shell.data.sae(finished(shell, "bare", [])))
    (line,) = shell.errors("arena", 1, code=1)
    assert "no known features on the report cards of 1; train on synthetic data" in line


def test_a_job_without_known_features_is_named_after_the_table_of_the_others(shell) -> None:
    finished(shell, "good", [0.6])
    put_card(shell.data.sae(finished(shell, "bare", [])))
    done = shell.run("arena", 1, 2, "--json", code=1)
    assert [one["recipe"] for one in json.loads(done.stdout)["recipes"]] == ["good"]
    assert "no known features on the report cards of 2; train on synthetic data" in done.stderr
