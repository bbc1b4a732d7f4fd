"""Checks the Python interpreter named by a job or the settings, and returns its command line and environment."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.contract.errors import UserError, sentence
from trainer.contract.settings.declare import show
from trainer.contract.settings.job import PYTHONS
from trainer.contract.trust import distrust_of_program, distrust_of_searched

# Variables that make an interpreter import another interpreter's packages, possibly in other versions.
_OF_ANOTHER = ("PYTHONPATH", "PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONEXECUTABLE", "__PYVENV_LAUNCHER__", "VIRTUAL_ENV")
# Other programs are refused because they would misinterpret Python's arguments: `sh -c` would run the code as a shell
# script.
_NAME = re.compile(r"(python|pypy)[\w.-]*")


def command(python: str | None, *words: str) -> list[str]:
    """Return the argv that runs the trainer with this interpreter; "" and None stand for the app's own interpreter.

    If the first of the `words` is `-c`, the argv runs that code instead of the trainer. The argv includes -P;
    otherwise, Python would import a `trainer` or `torch` module in the working folder.
    """
    start = [] if words[:1] == ("-c",) else ["-m", "trainer"]
    return [whole(python) or sys.executable, "-P", *start, *words]


def variables(python: str | None, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return environment variables with which this interpreter finds its own packages."""
    return {name: value for name, value in base.items() if not (python and name in _OF_ANOTHER)}


def unset_line() -> str:
    """Return the shell script line that unsets the variables removed by `variables`."""
    return f"unset {' '.join(_OF_ANOTHER)}"


def whole(python: str | None) -> str:
    """Return an interpreter's path with `~` expanded; keep symbolic links, because they identify the environment."""
    return os.path.expanduser(python) if python else ""


def refuse(python: str | None) -> None:
    """Raise `UserError` if the named interpreter cannot or must not be run."""
    if python and (why := refusal(python)):
        raise UserError(why)


def refusal(python: str) -> str:
    """Return why an interpreter cannot or must not be run, with a remedy, or "" if it may be run."""
    path = whole(python)
    if not os.path.isabs(path) or not path.isprintable():
        return f"takes {PYTHONS}, not {show(python)}"
    if not _NAME.fullmatch(os.path.basename(path)) and not os.path.isdir(path):
        return f"takes a program whose name starts with python, not {show(python)}"
    try:
        return _kind(Path(path)) or _distrust(Path(path))
    except (FileNotFoundError, NotADirectoryError):
        return f"{path} does not exist; name another Python, or none to use the app's own"
    except OSError as error:
        return f"{path} cannot be run: {sentence(error)}"


def _kind(path: Path) -> str:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        inside = path / "bin" / "python"
        return f"{path} is a folder; name the Python interpreter in it" + (f", {inside}" if inside.exists() else "")
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a regular file; name the Python interpreter of an environment"
    return "" if os.access(path, os.X_OK) else f"{path} is not executable; `chmod u+x` it, or name another Python"


def _distrust(python: Path) -> str:
    """Return how other users could change an interpreter or add files to its folder, or "" if they cannot.

    If the path is a symbolic link, check both the link's folder and its target's folder.
    """
    folders = (python.parent, python.resolve(strict=True).parent)
    why = distrust_of_program(python) or next(filter(None, map(distrust_of_searched, folders)), "")
    reason, _, remedy = why.partition("; ")
    return f"refusing to run {python}: {reason}; {remedy or 'name one of your own'}" if why else ""
