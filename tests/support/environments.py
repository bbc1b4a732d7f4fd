"""Other environments than the one that tests run in: real ones, made in a moment, and stand-ins that answer at once."""

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
# Writes down how each Python of the environment was started.
_TELLS = """
import sys
with open({file!r}, "a") as stream:
    print(*(word for word in sys.orig_argv if len(word) < 300), file=stream)
"""


def make_environment(folder: Path, *, trains: bool = True) -> Path:
    """Make a virtual environment and return its Python; one that trains has the packages of that of the tests.

    What each process of it was started as stands in `starts` beside it.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    if trains:
        (packages / "theirs.pth").write_text(f"{ROOT}\n{sysconfig.get_paths()['purelib']}\n")
    (packages / "sitecustomize.py").write_text(_TELLS.format(file=str(folder.with_name("starts"))))
    return folder / "bin" / "python"


def answer(**changes: Any) -> dict[str, Any]:
    """Return what the Python of an environment answers in which all is installed."""
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
    """Write a shell script in the place of a Python, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def answering(folder: Path, told: object = None) -> Path:
    """Write a stand-in that answers at once, and adds a line to `asked` beside it; return its path."""
    text = json.dumps(answer() if told is None else told)
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "answer.json").write_text(text)
    return stand_in(folder / "bin", f"echo asked >> {folder}/asked\ncat {folder}/answer.json")
