"""Tests for `sae-tui schema`, and for errors that commands write as JSON."""

from __future__ import annotations

import json
import subprocess
import sys


def test_schema_lists_all_schemas_and_prints_each(shell) -> None:
    names = shell.run("schema").stdout.splitlines()
    assert {"gpus", "trainer run", "error"} <= set(names)
    assert shell.json("schema") == {"commands": names}
    assert shell.json("schema", "trainer", "run")["title"].startswith("sae-train run --json")
    assert json.loads(shell.run("schema", "error").stdout)["required"] == ["error"]
    assert shell.json("schema", "nothing", code=2)["error"]["field"] == "COMMAND"


def test_with_json_an_error_is_one_object_on_stdout_and_stderr_is_empty(shell) -> None:
    shell.job_file.write_text(f'[data]\npath = "{shell.folder}"\n[sae]\nk = 0\n')
    for arguments, code, field in (
        (("job", 99), 1, None),
        (("job", "x"), 2, "ID"),
        (("gpus", "--watch", "--nothing"), 2, None),
        (("metrics", "--every", "5m"), 2, "--every"),
        (("launch", shell.job_file), 1, "sae.k"),
        (("completion",), 2, "SHELL"),
    ):
        done = shell.run(*arguments, "--json", code=code)
        (line,) = done.stdout.splitlines()
        assert json.loads(line)["error"]["field"] == field
        assert done.stderr == ""


def test_with_json_the_trainer_also_writes_an_error_as_one_object(shell) -> None:
    shell.job_file.write_text(f'[data]\npath = "{shell.folder}"\n[sae]\nk = 0\n')
    for arguments, code, field in (
        (["run", str(shell.job_file)], 2, "sae.k"),
        (["run"], 2, None),
        (["probe", "--precision", "no"], 2, "--precision"),
    ):
        argv = [sys.executable, "-m", "trainer", *arguments]
        as_json = subprocess.run([*argv, "--json"], capture_output=True, text=True)
        as_text = subprocess.run(argv, capture_output=True, text=True)
        assert (as_json.returncode, as_json.stderr, as_text.returncode, as_text.stdout) == (code, "", code, "")
        error = json.loads(as_json.stdout)["error"]
        assert error["field"] == field
        assert error["message"] in as_text.stderr
