from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer.contract.runs.rank_spec import rank_command
from trainer.ranks import environment
from trainer.ranks.environment import git_state, write_environment

GIT = (
    "git",
    "-c",
    "user.name=a",
    "-c",
    "user.email=a@b",
    "-c",
    "init.defaultBranch=main",
    "-c",
    "commit.gpgsign=false",
)


def git(folder: Path, *arguments: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run([*GIT, *arguments], cwd=folder, env=clean, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init")
    (folder / "a.py").write_text("1\n")
    git(folder, "add", "a.py")
    git(folder, "commit", "-m", "a")
    return folder


def test_only_the_owner_of_a_run_can_read_its_recorded_environment(tmp_path: Path) -> None:
    write_environment(tmp_path / "environment.json")
    assert stat.S_IMODE((tmp_path / "environment.json").stat().st_mode) == 0o600
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["versions"].keys() >= {"python", "torch", "cuda", "triton", "numpy", "sae-tui"}
    hardware = environment["hardware"]
    assert hardware["cores"] == len(os.sched_getaffinity(0))
    assert hardware["memory_bytes"] > 2**28
    assert hardware.keys() == {"host", "cpu", "cores", "memory_bytes", "gpus", "driver"}
    assert len(hardware["gpus"]) == torch.cuda.device_count()
    # The recorded command is that of this process's parent.
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[0]
    assert environment["command"][0] == parent
    assert environment["started"][:2] == "20"


def test_a_checkouts_commit_and_whether_it_has_uncommitted_changes_are_recorded(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert git_state(checkout) == {"commit": commit, "dirty": False}
    (checkout / "a.py").write_text("2\n")
    assert git_state(checkout) == {"commit": commit, "dirty": True}


def test_a_repository_that_contains_an_installed_package_is_ignored(checkout: Path) -> None:
    (checkout / "site-packages").mkdir()
    assert git_state(checkout / "site-packages") is None


def test_environment_variables_set_by_a_git_hook_do_not_select_another_repository(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    state = git_state(checkout)
    assert state is not None
    assert len(state["commit"]) == 40


def write_program(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "git").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "git").chmod(0o700)


@pytest.mark.parametrize("text", ["exit 1", "exec sleep 60", None])
def test_the_git_state_is_none_if_git_fails_hangs_or_is_missing(
    text: str | None, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text:
        write_program(tmp_path / "bin", text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin" if text else str(tmp_path / "bin"))
    monkeypatch.setattr(environment, "GIT_TIMEOUT_S", 0.2)
    assert git_state(checkout) is None


def test_unknown_values_are_null_and_raise_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the driver is gone")

    for name in ("git_state", "_command_of_parent", "_gpus", "_cpu_model"):
        monkeypatch.setattr(environment, name, fail)
    write_environment(tmp_path / "environment.json")
    recorded = json.loads((tmp_path / "environment.json").read_text())
    assert (recorded["git"], recorded["command"]) == (None, None)
    assert (recorded["hardware"]["gpus"], recorded["hardware"]["cpu"]) == (None, None)
    write_environment(tmp_path / "no such folder" / "environment.json")


def test_every_attempt_in_a_run_records_its_environment(
    make_job: Callable, start_ranks: Callable, tmp_path: Path
) -> None:
    ranks = start_ranks(make_job(train={"n_steps": 2}), 1, attempt=3, command=rank_command)
    assert ranks.wait() == [0]
    environment = json.loads((tmp_path / "run" / "attempt3" / "environment.json").read_text())
    assert environment["command"] == [part for part in Path("/proc/self/cmdline").read_text().split("\0") if part]
