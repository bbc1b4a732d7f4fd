"""Other packages and files called trainer that hide ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trainer.contract import exits


def test_another_package_called_trainer_is_reported_and_not_run(tmp_path: Path) -> None:
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
            [sys.executable, "-P", "-m", "sae_tui", "--version"],
            env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("sae-tui: error: ")
        assert str(other) in line
        assert ("pip uninstall trainer" in line) == (kind == "over ours")
