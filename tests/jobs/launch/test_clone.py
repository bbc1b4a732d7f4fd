"""Tests for creating a new job from the settings of an existing one."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest

from sae_tui.cli_commands.parser import make_parser
from sae_tui.jobs import edits
from sae_tui.jobs.edits import LONGEST_NAME
from sae_tui.jobs.launch.clone import clone_settings, free_name, grid, launch_line, name_by_axes
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.planning.training import TrainingProposal
from trainer.contract.planning.workload import Layout
from trainer.contract.settings.job_file import dump_job, load_any, parse_any


def test_a_clone_has_the_original_jobs_settings_with_the_given_changes(box):
    job_id = box.launch("steps=3", place={"hold": True})
    assert clone_settings(box.data, job_id) == box.config("steps=3")
    assert clone_settings(box.data, job_id, ["train.lr=0.01"]).train.lr == 0.01
    with pytest.raises(JobFileError, match=r"train\.lr: must be"):
        clone_settings(box.data, job_id, ["train.lr=fast"])
    with pytest.raises(UserError, match="there is no job 9;"):
        clone_settings(box.data, 9)


def test_the_form_suggests_an_unused_name_for_a_clone():
    assert free_name("quick", []) == "quick"
    assert free_name("quick", ["quick"]) == "quick-2"
    assert free_name("quick-2", ["quick", "quick-2", "quick-4"]) == "quick-3"
    assert free_name("gpt-2", ["gpt-2"]) == "gpt-2-2"
    longest = "x" * LONGEST_NAME
    assert free_name(longest, [longest]) == f"{longest[:-2]}-2"


def test_the_clone_of_a_renamed_job_gets_the_jobs_current_name(box):
    job_id = box.launch("steps=3", place={"hold": True})
    edits.rename(box.data, box.control, job_id, "better")
    assert clone_settings(box.data, job_id).name == "better"
    assert clone_settings(box.data, job_id, ["name=mine"]).name == "mine"
    box.data.run(job_id).job_file.unlink()
    assert clone_settings(box.data, job_id).name == "better"


def test_a_grid_creates_one_job_per_combination_each_with_its_own_name(box):
    axes = ["sae.k=[2,4]", " train.lr = 1e-3, 3e-4 "]
    sets = grid(axes)
    assert sets == [
        ["sae.k=2", "train.lr=1e-3"],
        ["sae.k=2", "train.lr=3e-4"],
        ["sae.k=4", "train.lr=1e-3"],
        ["sae.k=4", "train.lr=3e-4"],
    ]
    assert grid([]) == [[]]
    job = box.config("base").replace("train", lr=3e-4)
    assert name_by_axes(job, axes).name == "base k=4 lr=0.0003"
    # If a name is too long, the part before the values is truncated.
    assert name_by_axes(msgspec.structs.replace(job, name="x" * 79), axes).name == f"{'x' * 66} k=4 lr=0.0003"


@pytest.mark.parametrize("axis", ["sae.k", "sae.k=", "=1,2", "sae.k=,"])
def test_an_invalid_grid_is_rejected_with_a_message_that_names_the_flag(axis):
    with pytest.raises(JobFileError, match="--grid: takes a setting and values like"):
        grid([axis])


def test_a_grid_has_at_most_a_thousand_jobs():
    assert len(grid([f"train.seed={','.join(map(str, range(1000)))}"])) == 1000
    with pytest.raises(JobFileError, match="--grid: gives 2000 jobs, but at most 1000 are possible"):
        grid([f"train.seed={','.join(map(str, range(1000)))}", "sae.k=2,4"])


@pytest.mark.parametrize(
    ("train", "overrides"),
    [
        ({"batch_size": 64}, ["train.batch_size=32", "train.accumulate=2"]),
        ({"batch_size": 64, "accumulate": 3}, ["train.batch_size=32", "train.accumulate=6"]),
        ({"batch_size": 64, "global_batch_size": 128}, ["train.batch_size=32"]),
        ({"batch_size": 63}, []),
        ({"batch_size": 1}, []),
        ({"batch_size": "auto"}, ["train.batch_size=2048", "train.global_batch_size=8192"]),
        ({"batch_size": "auto", "global_batch_size": 1}, []),
    ],
)
def test_halving_the_micro_batch_keeps_the_tokens_per_step(box, train, overrides):
    job = box.config().replace("train", **train)
    assert TrainingProposal.half_batch(job, 2) == overrides
    if overrides:
        box.data.run(1).create()
        box.data.run(1).job_file.write_text(dump_job(job))
        half = clone_settings(box.data, 1, overrides)
        assert Layout(half, 2).tokens_per_step == Layout(job, 2).tokens_per_step
        assert Layout(half, 1).micro_batch <= Layout(job, 1).micro_batch


@pytest.mark.parametrize(
    "raw",
    [
        {
            "name": "it's quick",
            "data": {"path": "/data/sample"},
            "sae": {"k": 8, "d_sae": 512},
            "launch": {"gpus": "cpu"},
        },
        {
            "name": "a sweep",
            "data": {"path": ["/a b", "/c"]},
            "sae": {"k": [8, 16]},
            "train": {"lr": 1e-3, "n_steps": 70},
        },
        {
            "kind": "extract",
            "name": "rows",
            "model": {"path": "org/model", "hooks": ["h.3"]},
            "text": {"path": "/t.txt"},
            "extract": {"output": "/rows"},
        },
    ],
)
def test_a_jobs_launch_command_recreates_the_same_job(raw) -> None:
    job = parse_any(raw)[0]
    start, *words = shlex.split(launch_line(dump_job(job), job.name).removeprefix("sae-tui launch "))
    assert start == "/dev/null"
    assert words[0::2] == ["--set"] * (len(words) // 2)
    assert load_any(Path(start), words[1::2]) == job


def test_a_programs_launch_command_ends_with_the_programs_own_command() -> None:
    program = {"argv": ["python", "-c", "print('a b')"], "folder": "/tmp", "env": ["A=1"]}
    job = parse_any({"kind": "command", "name": "-probe", "command": program, "launch": {"gpus": "cpu"}})[0]
    flags = make_parser(lambda *_: 0).parse_args(shlex.split(launch_line(dump_job(job), "-renamed"))[1:])
    assert (flags.name, flags.argv[-3:]) == ("-renamed", program["argv"])
    assert flags.overrides == ["command.folder=/tmp", 'command.env=["A=1"]', "launch.gpus=cpu"]


@pytest.mark.parametrize("name", ['"q"', "'x'", "true", "[1]", " lead", "3e-4", "plain name", "-x"])
def test_a_name_that_looks_like_another_type_of_value_is_quoted_in_the_launch_command(name) -> None:
    job = parse_any({"name": "first", "data": {"path": "/d"}})[0]
    words = shlex.split(launch_line(dump_job(job), name))[3:]
    assert load_any(Path("/dev/null"), words[1::2]).name == name


@pytest.mark.parametrize("bad", ["\x03", "\x1b[201~", "\t", "\r", "\x9b"])
def test_a_command_with_control_characters_is_refused_because_they_could_end_a_paste(bad) -> None:
    job = parse_any({"kind": "command", "name": "x", "command": {"argv": ["echo", f"a{bad}\ntouch /tmp/x"]}})[0]
    with pytest.raises(UserError, match="the settings contain control characters, so the command is not copied"):
        launch_line(dump_job(job), "x")
    lines = parse_any({"kind": "command", "name": "x", "command": {"argv": ["python", "-c", "a\nb"]}})[0]
    assert shlex.split(launch_line(dump_job(lines), "x"))[-1] == "a\nb"
