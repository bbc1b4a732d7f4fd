"""Tests with other packages and files named `trainer`, which could be imported instead of sae-tui's package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.contract import exits

# The arguments that make Python start sae-train as its console script would.
SAE_TRAIN = ["-c", "import sys; from sae_tui.own_trainer import sae_train; sys.exit(sae_train())"]


@pytest.mark.parametrize(("program", "start"), [("sae-tui", ["-m", "sae_tui"]), ("sae-train", SAE_TRAIN)])
def test_a_foreign_package_named_trainer_is_reported_and_not_run(
    tmp_path: Path, program: str, start: list[str]
) -> None:
    others = {"file": tmp_path / "file/trainer.py", "pypi": tmp_path / "pypi/trainer/__init__.py"}
    others["over ours"] = tmp_path / "over/trainer/__init__.py"
    for other in others.values():
        other.parent.mkdir(parents=True)
        other.write_text("raise SystemExit('it ran')")
    (tmp_path / "over/trainer/contract").mkdir()
    (tmp_path / "over/trainer/contract/exits.py").touch()
    for kind, other in others.items():
        root = other.parent if kind == "file" else other.parents[1]
        path = os.pathsep.join([str(root), str(Path(exits.__file__).parents[2])])
        done = subprocess.run(
            [sys.executable, "-P", *start, "--help"],
            env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"{program}: error: ")
        assert str(other) in line
        assert ("pip uninstall trainer" in line) == (kind == "over ours")


def test_a_trainer_file_in_the_current_folder_does_not_replace_the_trainer_package(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("raise SystemExit('it ran')")
    for start, code in ((["-m", "sae_tui", "--version"], 1), (["-P", *SAE_TRAIN, "--help"], 0)):
        done = subprocess.run([sys.executable, *start], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode, "it ran" in done.stdout + done.stderr) == (code, False)
