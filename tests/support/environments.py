"""Python environments other than the tests' own: real ones that are quick to create, and scripts in place of Python."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainer.contract.settings.known import known_settings

ROOT = Path(__file__).parents[2]
TORCH = {"version": "2.9.0+cpu", "cuda": None, "hip": None, "gpus": 0}
# This code makes each Python process in the environment append its command line to a file.
_TELLS = """
import sys
with open({file!r}, "a") as stream:
    print(*(word for word in sys.orig_argv if len(word) < 300), file=stream)
"""


def make_environment(folder: Path, *, trains: bool = True) -> Path:
    """Create a virtual environment and return its Python. With `trains`, it can import all packages that the tests can.

    The arguments of each Python process are recorded in the file `starts` next to the environment.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    if trains:
        (packages / "theirs.pth").write_text(f"{ROOT}\n{sysconfig.get_paths()['purelib']}\n")
    # Not `sitecustomize.py`, since Debian's Python has one of its own.
    (packages / "records.py").write_text(_TELLS.format(file=str(folder.with_name("starts"))))
    (packages / "records.pth").write_text("import records\n")
    return folder / "bin" / "python"


def answer(**changes: Any) -> dict[str, Any]:
    """Return what Python reports about an environment where everything is installed."""
    told = {
        "version": [3, 12, 1],
        "paths": [],
        "packages": ["torch", "numpy", "safetensors"],
        "trainer": version("sae-tui"),
        "settings": known_settings(),
        "torch": TORCH,
    }
    return told | changes


def stand_in(folder: Path, script: str, name: str = "python") -> Path:
    """Write a shell script to run in place of Python, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def answering(folder: Path, told: object = None) -> Path:
    """Write a script to run in place of Python that replies immediately; return its path.

    Each time the script runs, it appends a line to the file `asked` in `folder`.
    """
    text = json.dumps(answer() if told is None else told)
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "answer.json").write_text(text)
    return stand_in(folder / "bin", f"echo asked >> {folder}/asked\ncat {folder}/answer.json")
