"""Tests for `jobs FILTER` and `compare`."""

from __future__ import annotations

import csv
from contextlib import closing
from xml.etree import ElementTree

import pytest

from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState


@pytest.fixture
def two(shell) -> None:
    """Record two finished runs with different k, each with a curve."""
    for name, k, fvu in (("narrow", 16, 0.3), ("wide", 64, 0.1)):
        config = dump_job(parse_job({"name": name, "data": {"path": "x"}, "sae": {"k": k}})[0])
        record(shell, name, config, fvu=fvu, tags=("pair", name[0]))


def record(shell, name: str, config: str, fvu: float, **fields) -> None:
    shell.data.create()
    with closing(Control(shell.data.control_db)) as control:
        job = Job(name=name, config=config, user="me", host="here", device="cpu", gpu_source="none", fvu=0.05, **fields)
        job_id = control.create_job(job)
        assert control.transition(job_id, JobState.STARTING, started=1000.0)
        assert control.transition(job_id, JobState.RUNNING)
        assert control.transition(job_id, JobState.FINISHED, ended=1090.0)
    shell.data.run(job_id).create()
    with closing(SeriesWriter(shell.data.run(job_id).metrics_db)) as writer:
        values = [
            MetricRow("fvu", 10, 2 * fvu),
            MetricRow("fvu", 20, 0.05),
            MetricRow("heldout_fvu", 20, fvu),
            MetricRow("loss", 20, 1.0),
        ]
        writer.write(values, Heartbeat("done", 20, 20, 2000, 0.0))


def test_jobs_are_filtered_by_words_sorted_and_limited(shell, two):
    assert [job["name"] for job in shell.json("jobs", "#pair", "state:finished")] == ["wide", "narrow"]
    assert [job["name"] for job in shell.json("jobs", "--sort", "name")] == ["narrow", "wide"]
    assert [job["name"] for job in shell.json("jobs", "--sort", "fvu", "--limit", "1")] == ["wide"]
    assert shell.json("jobs", "narrow", "wide") == []
    assert shell.run("jobs", "nothing").stdout == "none of the 2 jobs matches the filter\n"


def test_an_unknown_sort_order_is_a_usage_error(shell):
    (line,) = shell.errors("jobs", "--sort", "speed", code=2)
    assert "'newest', 'name'" in line


def test_differing_settings_and_results_are_printed_as_two_tables(shell, two):
    settings, results = shell.run("compare", 1, 2).stdout.split("\n\n")
    assert [line.split() for line in settings.splitlines()] == [
        ["SETTING", "1", "2"], ["name", "narrow", "wide"], ["sae.k", "16", "64"],
    ]  # fmt: skip
    lines = [line.split() for line in results.splitlines()]
    assert lines[:2] == [["RESULT", "1", "2"], ["held-out", "FVU", "0.3", "0.1", "★"]]


def test_a_renamed_job_is_shown_by_its_new_name(shell, two):
    assert shell.run("rename", 2, "broad").returncode == 0
    settings, _ = shell.run("compare", 1, 2).stdout.split("\n\n")
    assert settings.splitlines()[1].split() == ["name", "narrow", "broad"]


def test_the_comparison_as_json_contains_numbers(shell, two):
    answer = shell.json("compare", 1, 2)
    assert [run["heldout_fvu"] for run in answer["runs"]] == [0.3, 0.1]
    assert answer["differences"] == {"name": ["narrow", "wide"], "sae.k": [16, 64]}


def test_curves_are_written_as_svg_and_as_csv(shell, two):
    svg, table = shell.folder / "a.svg", shell.folder / "a.csv"
    files = ("--svg", svg, "--csv", table)
    assert shell.json("compare", 1, 2, *files) == {"svg": str(svg), "csv": str(table)}
    assert "held-out FVU: 1 narrow, 2 wide" in {element.text for element in ElementTree.parse(svg).getroot().iter()}
    rows = list(csv.DictReader(table.open()))
    points = [(row["run"], row["metric"], row["step"], row["tokens"], row["value"]) for row in rows]
    assert ("2", "heldout_fvu", "20", "2000", "0.1") in points
    assert len(points) == 8
    (line,) = shell.errors("compare", 1, 2, *files, code=1)
    assert "a.svg already exists" in line
    shell.run("compare", 1, 2, *files, "--force", "--metric", "loss", "--x", "tokens", "--smooth", "0.6", "--log")
    assert {row["metric"] for row in csv.DictReader(table.open())} == {"loss"}


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("1", "7"), 1, "there is no job 7"),
        (("1", "--metric", "speed"), 1, '--metric: these runs have no "speed"; use one of heldout_fvu, fvu'),
        (("1", "--smooth", "1"), 2, "from 0 to below 1"),
        ((), 2, "ID"),
    ],
)
def test_an_invalid_comparison_is_reported_in_one_line(shell, two, flags, code, said):
    (line,) = shell.errors("compare", *flags, code=code)
    assert said in line
