"""Tests for job arrays: launching them, what their programs see, and how they are listed."""

from __future__ import annotations

import json

import pytest
from support.box import wait_for_store

from trainer.contract.store.job_store import Control


def jobs(shell) -> list[dict]:
    """Return the jobs, oldest first."""
    return shell.json("jobs")[::-1]


def argv(shell, job_id: int) -> list[str]:
    control = Control(shell.data.control_db, readonly=True)
    config = control.job(job_id).config
    control.close()
    assert config == shell.data.run(job_id).job_file.read_text()
    return [line.strip(' ",') for line in config.partition("argv = [")[2].partition("]")[0].split("\n")[1:-1]]


def test_an_array_has_one_job_per_index(shell):
    shell.run("run", "--gpus", 0, "--hold", "--array", "0-4:2%2", "--", "echo", "seed={array_index}", "{job_id}")
    assert [(job["id"], job["array"], job["array_limit"]) for job in jobs(shell)] == [(1, 1, 2), (2, 1, 2), (3, 1, 2)]
    assert [job["name"] for job in jobs(shell)] == [f"echo seed={index} {{job_id}}" for index in (0, 2, 4)]
    # Placeholders whose values are known only when the job starts are left in place.
    assert argv(shell, 2) == ["echo", "seed=2", "{job_id}"]
    shell.run("run", "--gpus", 0, "--hold", "--", "true")
    assert (jobs(shell)[3]["array"], jobs(shell)[3]["array_limit"]) == (None, None)


SHOW = "echo $SAE_TUI_ARRAY_INDEX of $SAE_TUI_ARRAY_ID, {array_index}, $MODE"


def test_a_program_and_its_clone_see_their_array_index(shell):
    shell.run("run", "--gpus", 0, "--hold", "--", "true")
    flags = ("--gpus", 0, "--array", "3,5", "--env", "MODE=m{array_index}", "--name", "probe")
    shell.run("run", *flags, "--wait", "--shell", SHOW)
    assert [shell.json("logs", job_id)["lines"] for job_id in (2, 3)] == [["3 of 2, 3, m3"], ["5 of 2, 5, m5"]]
    assert [job["name"] for job in jobs(shell)[1:]] == ["probe [3]", "probe [5]"]
    shell.run("clone", 3, "--wait")
    assert shell.json("logs", 4)["lines"] == ["5 of 2, 5, m5"]
    assert jobs(shell)[3]["array"] is None


def test_a_grid_is_an_array_with_numbered_jobs_and_a_limit(shell):
    grid = ("--grid", "a=x,y", "--grid", "b=1,2", "--at-once", 3)
    done = shell.run("run", "--json", "--gpus", 0, "--hold", *grid, "--", "echo", "{a}{b}", "{array_index}")
    assert [one["array"] for one in json.loads(done.stdout)] == [1] * 4
    assert [argv(shell, job_id)[1:] for job_id in range(1, 5)] == [["x1", "0"], ["x2", "1"], ["y1", "2"], ["y2", "3"]]
    assert {job["array_limit"] for job in jobs(shell)} == {3}


def test_a_grid_with_an_array_launches_a_job_for_each_combination(shell):
    shell.run("run", "--gpus", 0, "--hold", "--grid", "a=x,y", "--array", "7,9%1", "--", "echo", "{a}", "{array_index}")
    assert [argv(shell, job_id)[1:] for job_id in range(1, 5)] == [["x", "7"], ["x", "9"], ["y", "7"], ["y", "9"]]
    assert [(job["array"], job["array_limit"]) for job in jobs(shell)] == [(1, 1)] * 4


def test_a_grid_of_training_jobs_is_an_array(shell):
    grid = ("--gpus", "cpu", "--hold", "--grid", "sae.k=2,4")
    shell.run("launch", shell.job_file, *grid, "--at-once", 1)
    assert [(job["array"], job["array_limit"]) for job in jobs(shell)] == [(1, 1), (1, 1)]
    shell.run("launch", shell.job_file, shell.job_file, "--gpus", "cpu", "--hold")
    assert [job["array"] for job in jobs(shell)] == [1, 1, None, None]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--at-once", "2"], "--at-once: limits several jobs, but there is only one; add --grid"),
        (["--array", "1-3%2", "--at-once", "2"], "--at-once: is also given by --array; leave out one of them"),
        (["--array", "3-1"], '--array: must be like 0-31, 0-31:2, 1,3,7 or 0-31%4, not "3-1"'),
        (["--array", "0-99", "--grid", "a=1,2,3,4,5,6,7,8,9,10,11"], "--grid: gives 1,100 jobs, but at most 1,000"),
        (["--grid", "a=1,2", "--grid", "a=3"], "--grid: names a variable twice; write all its values in one --grid"),
        (["--grid", "lr=1,2"], "--grid: lr is not used; write {lr} in the command or in --env"),
        (["--grid", "gpus=1,2"], "--grid: {gpus} has another meaning; choose another name"),
        (["--grid", "a"], '--grid: must be a name and values like lr=1e-3,3e-4, not "a"'),
        (["--time", "0"], "--time: must be longer than 0 s and at most 10,000 days, not 0"),
        (["--memory", "0GiB"], "--memory: must be more than 0; leave it out to use idle GPUs"),
        (["--set", "command.log_limit_mib=0"], "command.log_limit_mib: must be an integer of at least 1"),
        (["--set", "launch.backend=x"], 'launch.backend: must be "local" or "slurm" or "skypilot", not "x"'),
        (["--env", "a"], '--env: must be NAME=VALUE, not "a"'),
        (["--shell", "true"], "--shell: is given in addition to a command after --"),
        (["--grid", "array_index=1,2"], "--grid: array_index is the index of a job; choose another name"),
        (["--at-once", "0"], '--at-once: must be an integer of at least 1, not "0"'),
    ],
)
def test_an_invalid_array_is_refused_in_one_line(shell, flags, said):
    (line,) = shell.errors("run", "--gpus", 0, *flags, "--", "true", code=2)
    assert line.startswith(f"sae-tui: error: {said}")
    assert jobs(shell) == []


def test_gpus_and_folders_that_this_machine_lacks_are_not_usage_errors(shell):
    (line,) = shell.errors("run", "--gpus", 0, "--folder", "/nowhere", "--", "true", code=1)
    assert line.startswith("sae-tui: error: --folder: is not a folder: /nowhere")
    (line,) = shell.errors("run", "--gpus", "auto:64", "--", "true", code=1)
    assert line.startswith("sae-tui: error: --gpus: ")
    (line,) = shell.errors("run", "--set", "launch.gpus=auto:64", "--", "true", code=1)
    assert line.startswith("sae-tui: error: launch.gpus: ")


def test_jobs_in_a_grid_have_different_names_even_if_the_names_are_truncated(shell):
    for flags in (["--name", "n" * 80], []):
        shell.run("run", "--gpus", 0, "--hold", *flags, "--grid", "seed=0,1", "--", "echo", "x" * 100, "{seed}")
    names = [job["name"] for job in jobs(shell)]
    assert [name[-7:] for name in names] == [" seed=0", " seed=1"] * 2
    assert {len(name) for name in names} == {80}


def test_grid_values_are_inserted_literally(shell):
    grid = ("--grid", "a={b},x", "--grid", "b=1")
    shell.run("run", "--gpus", 0, "--hold", *grid, "--", "echo", "{a}{b}", "{other}")
    assert [argv(shell, job_id) for job_id in (1, 2)] == [["echo", "{b}1", "{other}"], ["echo", "x1", "{other}"]]


def test_a_grid_setting_may_be_given_only_once(shell):
    (line,) = shell.errors("launch", shell.job_file, "--grid", "sae.k=2,4", "--grid", "sae.k=8", code=2)
    assert line == "sae-tui: error: --grid: sae.k is given twice; write all of its values in one --grid"


def test_passing_a_command_with_set_is_consent_to_the_command_but_not_its_variables(shell, tmp_path):
    file = tmp_path / "job.toml"
    flags = ("--gpus", "cpu", "--hold", "--set", 'command.argv=["true"]')
    file.write_text('kind = "command"\nname = "x"\n[command]\nargv = ["false"]\n')
    shell.run("launch", file, *flags)
    assert argv(shell, 1) == ["true"]
    file.write_text(file.read_text() + 'env = ["LD_PRELOAD=/evil"]\n')
    (line,) = shell.errors("launch", file, *flags, code=1)
    assert line.startswith('sae-tui: error: command.env: sets "LD_PRELOAD=/evil" for a program that runs as you')
    shell.run("launch", file, *flags, "--allow-code")


def test_a_large_array_is_reported_in_one_line(shell):
    done = shell.run("run", "--gpus", 0, "--hold", "--array", "0-8%4", "--", "true")
    assert done.stdout == (
        "array 1: 9 jobs (1-9) are held, at most 4 of them at once; `sae-tui release 1-9` lets them start\n"
    )
    shell.run("stop", "1-9", "--yes")
    wait_for_store(shell.data, lambda control: all(job.state.is_final for job in control.jobs()))


def test_an_array_is_listed_as_one_line_unless_its_jobs_are_asked_for(shell):
    shell.run("run", "--gpus", 0, "--hold", "--array", "0-2", "--name", "probe", "--", "true")
    shell.run("run", "--gpus", 0, "--hold", "--", "true")
    folded = shell.run("jobs").stdout.splitlines()
    assert [line.split()[0] for line in folded] == ["ID", "4", "1"]
    assert "array 1 · 3 jobs · 3 held · probe" in folded[2]
    assert [line.split()[0] for line in shell.run("jobs", "--all").stdout.splitlines()[1:]] == ["4", "3", "2", "1"]
    assert [line.split()[0] for line in shell.run("jobs", "probe").stdout.splitlines()[1:]] == ["3", "2", "1"]
    assert [line.split()[0] for line in shell.run("jobs", "--limit", 2).stdout.splitlines()[1:]] == ["4", "1"]
    assert [job["id"] for job in shell.json("jobs", "--limit", 2)] == [4, 3]
