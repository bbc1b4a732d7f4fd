"""Tests for the sdist when it is installed offline, with and without the packages that the trainer needs."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from support.packages import plain_environment
from support.terminal import Terminal

from trainer.contract.paths import DataDir
from trainer.contract.store.states import JobState

LACK = "the trainer lacks torch, numpy and safetensors: `pip install 'sae-tui[train]'` adds them"
JOB = """
name = "small"
[data]
path = "{sample}"
[sae]
d_sae = 64
k = 4
[train]
batch_size = 256
n_steps = 10
report_card = false
[launch]
gpus = "cpu"
"""
# Runs many commands in one process, so that Python is started only once.
ALL = """
import contextlib, io, json, sys
import sae_tui.cli, trainer.cli
answers = []
for program, *words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    sys.argv = [program, *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = (trainer.cli.main if program == "trainer" else sae_tui.cli.main)(words)
    answers.append([[program, *words], code, out.getvalue(), err.getvalue()])
assert not {"torch", "numpy", "safetensors"} & sys.modules.keys()
print(json.dumps(answers))
"""


class Installed:
    """The installed programs with their own data folder."""

    def __init__(self, bin_folder: Path, folder: Path) -> None:
        self.bin, self.folder, self.data = bin_folder, folder, DataDir(folder / "data" / "demo")
        (package,) = bin_folder.parent.glob("lib/python*/site-packages/sae_tui")
        self.package = package
        self.env = plain_environment(SAE_TUI_DATA_DIR=str(folder / "data"), HOME=str(folder))
        self.job_file = folder / "job.toml"
        self.job_file.write_text(JOB.format(sample=package / "data" / "sample"))

    def with_torch(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a program that can also import packages from the test environment; installed packages take precedence."""
        own, here = str(self.package.parent), sysconfig.get_path("purelib")
        return self.run(*argv, PYTHONPATH=f"{own}:{here}")

    def run(self, *argv: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        argv = (str(self.bin / argv[0]), *argv[1:])
        return subprocess.run(
            argv, input=stdin, capture_output=True, text=True, env=self.env | env, cwd=self.folder, timeout=200
        )

    def jobs(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = json.loads(self.run("sae-tui", "--demo", "jobs", "--json").stdout)
        return answer


@pytest.fixture
def installed(watching: Path, tmp_path: Path) -> Installed:
    return Installed(watching, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_without_torch_the_dashboard_opens_and_the_review_names_what_is_missing(installed: Installed) -> None:
    terminal = Terminal([str(installed.bin / "sae-tui"), "--demo"], env=installed.env, cwd=installed.folder)
    try:
        terminal.wait_for("RTX 3080", 90)
        terminal.send("n")
        terminal.wait_for(f"✗ {LACK}", 60)
        terminal.send("\x0c")  # ctrl+l
        terminal.wait_for("Not launched", 60)
        terminal.send("\x1bq")
        assert terminal.wait_for_exit(60) == 0
    finally:
        terminal.close()
    assert installed.jobs() == []


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_with_torch_the_sample_trains_and_without_it_nothing_can_be_started(installed: Installed) -> None:
    where = "import sae_tui, sys, torch, trainer; print(sae_tui.__file__, trainer.__file__, sys.prefix)"
    printed = installed.with_torch("python", "-P", "-c", where).stdout
    assert printed.count(str(installed.bin.parent)) == 3, printed
    done = installed.with_torch("sae-tui", "--demo", "launch", str(installed.job_file), "--wait")
    assert done.returncode == 0, (done, installed.run("sae-tui", "--demo", "logs", "1").stdout)
    (trained,) = installed.jobs()
    assert {"sae_weights.safetensors", "cfg.json"} <= {file.name for file in Path(trained["output_path"]).iterdir()}

    shown, refused = commands(installed), refusals(installed)
    lines = [*shown, *refused]
    done = installed.run("python", "-P", "-c", ALL, stdin=json.dumps(lines))
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert [one for one in answers[: len(shown)] if one[1] != 0] == []
    for line, code, out, err in answers[len(shown) :]:
        assert code in (1, 2), line
        assert (out + err).count(LACK) == 1, (line, out, err)
        assert "Traceback" not in err
    (after,) = installed.jobs()
    assert (after["state"], after["attempt"]) == (JobState.FINISHED, trained["attempt"])
    assert not list(installed.folder.rglob(".import-*"))


def commands(installed: Installed) -> list[list[str]]:
    """Return command lines that work without torch."""
    file, csv = str(installed.job_file), str(installed.folder / "curves.csv")
    lines = [
        ["gpus"], ["gpus", "0", "--json"], ["select"], ["metrics"], ["metrics", "--view", "per_gpu", "--json"],
        ["recommend", file], ["jobs"], ["jobs", "state:finished", "--json"],
        ["job", "1"], ["logs", "1"], ["compare", "1", "--csv", csv], ["clone", "1", "--print"], ["rename", "1", "new"],
        ["tag", "1", "good"], ["note", "1", "kept"], ["completion", "bash"], ["repair"],
    ]  # fmt: skip
    return [*(["sae-tui", "--demo", *line] for line in lines), ["trainer", "estimate", file]]


def refusals(installed: Installed) -> list[list[str]]:
    """Return command lines that fail without torch."""
    file, sample, run = str(installed.job_file), str(installed.package / "data/sample"), str(installed.data.run(1).root)
    out, sae = str(installed.folder / "out"), str(installed.data.sae(1))
    longer = ["--set", "train.n_steps=20"]
    lines = [
        ["launch", file], ["launch", file, "--gpus", "0,1"], ["validate", file], ["resume", "1", *longer],
        ["clone", "1"], ["eval", "1", "--wait"], ["import", sae, "--data", sample],
    ]  # fmt: skip
    by_trainer = [
        ["run", file, "--out", out], ["resume", run, *longer], ["inspect", sample], ["export", run, "--out", out],
        ["import", sae, "--out", out, "--data", sample], ["eval", run], ["bench", file], ["probe"], ["self-test"],
        ["join", file, "--out", out], ["extract", file],
    ]  # fmt: skip
    return [*(["sae-tui", "--demo", *line] for line in lines), *(["trainer", *line] for line in by_trainer)]


@pytest.mark.parametrize("check", [["doctor"], ["doctor", "--probe", "--self-test"]])
def test_without_torch_the_doctor_reports_this_once_with_the_install_command(
    installed: Installed, check: list[str]
) -> None:
    done = installed.run("sae-tui", "--demo", *check, "--json")
    (finding,) = [one for one in json.loads(done.stdout)["findings"] if one["level"] == "error"]
    assert finding["subject"] == "torch"
    assert finding["remedy"] == "run `pip install 'sae-tui[train]'`"
    assert done.returncode == 1
