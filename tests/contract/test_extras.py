"""Tests that a missing optional package is reported with the command that installs it in the current environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.contract.extras import install, lack_of_trainer

ASK = "import sys; sys.path[:] = sys.argv[1:]; from trainer.contract.extras import lack_of_trainer as ask; print(ask())"
ROOT = Path(__file__).parents[2]


def test_nothing_is_missing_when_the_trainer_can_run() -> None:
    assert lack_of_trainer() == ""


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ((), "torch, numpy and safetensors: `pip install 'sae-tui[train]'` adds them"),
        (("torch", "numpy"), "safetensors: `pip install 'sae-tui[train]'` adds it"),
    ],
)
def test_only_missing_packages_are_named(tmp_path, there, told) -> None:
    for name in there:
        (tmp_path / f"{name}.py").touch()
    # A folder without Python files is not a package, even if it has a package's name.
    (tmp_path / "safetensors").mkdir()
    code = "import sys, os, re, pathlib, msgspec, importlib.util"
    path = [str(tmp_path), str(ROOT), *(entry for entry in sys.path if "site-packages" not in entry and entry)]
    done = subprocess.run([sys.executable, "-c", f"{code}; {ASK}", *path], capture_output=True, text=True, check=True)
    assert done.stdout == f"the trainer lacks {told}\n"


@pytest.mark.parametrize(
    ("mark", "command"),
    [
        ("env/other", "pip install"),
        ("env/uv-receipt.toml", "uv tool install"),
        ("archive-v0/other", "uv tool install"),
        ("env/pipx_metadata.json", "pipx install --force"),
    ],
)
def test_the_command_for_an_extra_uses_the_tool_that_created_the_environment(
    tmp_path, monkeypatch, mark, command
) -> None:
    folder = (tmp_path / mark).parent / "of-sae-tui"
    folder.mkdir(parents=True)
    (folder / Path(mark).name).touch()
    monkeypatch.setattr(sys, "prefix", str(folder))
    assert install("hf") == f"{command} 'sae-tui[hf]'"
