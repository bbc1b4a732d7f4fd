"""Tests for commands run with closed outputs, with names in other encodings, and with an unusual umask or shell."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys

import pytest
from support.forked_commands import run_command

from sae_tui.cli_commands.completion import job_ids
from sae_tui.cli_commands.parser import make_parser
from sae_tui.jobs.edits import as_tags
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.paths import DataDir
from trainer.contract.settings.job_file import job_of
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job


def started(shell, *arguments, **options):
    return subprocess.run(
        shell.argv(*arguments), timeout=120, cwd=shell.folder, capture_output=True, **{"env": shell.env} | options
    )


@pytest.mark.parametrize(("closed", "told"), [(1, "standard output is closed"), (2, "standard error is closed")])
def test_nothing_is_launched_if_an_output_is_closed(shell, closed, told):
    done = started(shell, "launch", shell.job_file, "--gpus", "cpu", preexec_fn=lambda: os.close(closed))
    assert done.returncode == 1
    assert told in (done.stdout + done.stderr).decode()
    assert b"Traceback" not in done.stderr
    assert shell.json("jobs") == []


def test_arguments_that_are_not_utf_8_are_rejected_in_one_line(shell):
    done = started(shell, "launch", shell.job_file, "--set", "name=\udcff")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.splitlines()[-1].endswith(b"set the terminal's encoding to UTF-8")
    umlaut = started(
        shell, "launch", shell.job_file, "--set", "name=f\xfcr",
        env=shell.env | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )  # fmt: skip
    assert b"Traceback" not in umlaut.stderr
    assert shell.json("jobs") == []


@pytest.mark.parametrize("name", [b"/tmp/" + b"long" * 750, b"/tmp/caf\xe9"], ids=["long", "not UTF-8"])
def test_an_unusable_data_folder_name_is_rejected_in_one_line(shell, name):
    for command in (["jobs"], ["launch", shell.job_file, "--gpus", "cpu"], ["gpus"]):
        done = started(shell, *command, env=os.environ | {b"SAE_TUI_DATA_DIR": name})
        (line,) = done.stderr.splitlines()
        assert (done.returncode, line.endswith(b"choose another with --data-dir")) == (1, True)


def test_files_stay_accessible_to_their_owner_under_umask_777(shell):
    def start():
        os.umask(0o777)

    done = started(shell, "launch", shell.job_file, "--gpus", "cpu", "--wait", preexec_fn=start)
    assert done.returncode == 0, done.stderr
    modes = {stat.S_IMODE(path.stat().st_mode) for path in shell.data.root.rglob("*")}
    assert modes <= {0o700, 0o600}


def test_control_characters_in_a_job_name_are_replaced_in_completions(tmp_path):
    data = DataDir(tmp_path)
    data.create()
    with contextlib.closing(Control(data.control_db)) as control:
        control.create_job(
            Job(name="a\v2\x1b[31m\tb", config="", user="me", host="here", device="cpu", gpu_source="none")
        )
    flags = make_parser(lambda *_: 0).parse_args(["jobs", "--data-dir", str(tmp_path)])
    assert job_ids(flags) == {"1": "a�2�[31m b (queued)"}


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("launch.gpus=cpu:99999999999999999999", "launch.gpus"),
        (f"launch.gpus=cpu:{'9' * 5000}", "launch.gpus"),
        ("launch.gpus=cpu:1000000", "launch.gpus"),
        ("launch.gpus=[99999999]", "launch.gpus"),
        (f"launch.nodes={2**62}", "launch.nodes"),
        (f"parallel.shares={'9' * 400}:1", "parallel.shares"),
        ('name="a\\u0000b"', "name"),
        ('name="a\\u001b[31mb"', "name"),
        ("data.source=synthetic data.n_features=9223372036854775807", "data.n_features"),
    ],
)
def test_numbers_out_of_range_and_invalid_names_are_rejected_during_validation(tmp_path, words, path):
    raw = {"data": {} if "synthetic" in words else {"path": str(tmp_path)}}
    with pytest.raises(JobFileError) as refused:
        job_of(raw, words.split()).data_shape()
    (problem,) = refused.value.problems
    assert (problem.path, len(str(problem)) < 250) == (path, True)


def test_control_characters_in_names_tags_and_notes_are_rejected(tmp_path):
    for text in ("a\0b", "a\x1b[31m", "a\x9bb", "a\u202eb", "a\nb"):
        with pytest.raises(UserError, match="cannot contain control characters: remove them from"):
            as_tags([text])
    assert as_tags(["grün", "宽"]) == ("grün", "宽")


@pytest.mark.parametrize("command", [["launch", "--hold"], ["validate"]])
def test_a_cpu_job_is_not_warned_about_missing_gpus(shell, command):
    of_cpu, of_a_gpu = (
        run_command([*command, str(shell.job_file), "--gpus", gpus], shell.env, shell.folder, timeout=120)
        for gpus in ("cpu", "auto:1")
    )
    run_command(["stop", "1"], shell.env, shell.folder, timeout=120)
    assert (of_cpu.returncode, "driver" in of_cpu.stderr) == (0, False)
    # A job that requests a GPU gets a warning on a machine without GPUs.
    assert of_a_gpu.returncode == 0 or "driver" in of_a_gpu.stderr


def test_readonly_cannot_be_combined_with_a_command(shell):
    done = started(shell, "--readonly", "stop", "1")
    assert done.returncode == 2
    assert done.stderr.decode() == (
        "sae-tui: error: --readonly: works only in the app; leave it out, or leave out the command; "
        "see sae-tui --help\n"
    )


def test_a_foreign_package_named_trainer_is_reported_before_its_code_runs(tmp_path):
    folder = tmp_path / "a\x1b[2J"
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "__init__.py").write_text("raise SystemExit('this ran')\n")
    command = [sys.executable, "-P", "-m", "sae_tui", "jobs"]
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    shown = f"{tmp_path}/a\ufffd[2J/trainer/__init__.py"
    message = f"`import trainer` finds {shown}, which is not sae-tui's trainer"
    fix = "rename it, or remove its folder from PYTHONPATH"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"sae-tui: error: {message}; {fix}\n")
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=env, timeout=60)
    answer = {"error": {"field": None, "message": message, "fix": fix}}
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (1, answer, "")
