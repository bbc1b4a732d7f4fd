"""The Python named by a job or the settings, or else the app's own: checked before it runs, and its command line."""

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

# Variables that direct a Python to the packages of another one, which may have other versions.
_OF_ANOTHER = ("PYTHONPATH", "PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONEXECUTABLE", "__PYVENV_LAUNCHER__", "VIRTUAL_ENV")
# Any other program would interpret arguments meant for Python: `sh -c` would run the code as a shell script.
_NAME = re.compile(r"(python|pypy)[\w.-]*")


def command(python: str | None, *words: str) -> list[str]:
    """Return the argv that runs the trainer, or `words` that begin with `-c`, with this Python, "" for the app's.

    It includes -P, since a `trainer` or `torch` in the working folder would be imported instead.
    """
    start = [] if words[:1] == ("-c",) else ["-m", "trainer"]
    return [whole(python) or sys.executable, "-P", *start, *words]


def variables(python: str | None, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for running this Python: a Python other than the app's must find its own packages."""
    return {name: value for name, value in base.items() if not (python and name in _OF_ANOTHER)}


def unset_line() -> str:
    """Return a shell script line that unsets the variables that `variables` removes."""
    return f"unset {' '.join(_OF_ANOTHER)}"


def whole(python: str | None) -> str:
    """Return the path with `~` expanded; links are kept, since the link identifies the environment."""
    return os.path.expanduser(python) if python else ""


def refuse(python: str | None) -> None:
    """Raise `UserError` if the named Python cannot or must not be run."""
    if python and (why := refusal(python)):
        raise UserError(why)


def refusal(python: str) -> str:
    """Explain why a Python cannot or must not be run, with a remedy; return "" if it may be run."""
    path = whole(python)
    if not os.path.isabs(path) or not path.isprintable():
        return f"takes {PYTHONS}, not {show(python)}"
    if not _NAME.fullmatch(os.path.basename(path)) and not os.path.isdir(path):
        return f"takes a program whose name begins with python, not {show(python)}"
    try:
        return _kind(Path(path)) or _distrust(Path(path))
    except (FileNotFoundError, NotADirectoryError):
        return f"there is no {path}; name another Python, or none to use the app's own"
    except OSError as error:
        return f"{path} cannot be run: {sentence(error)}"


def _kind(path: Path) -> str:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        inside = path / "bin" / "python"
        return f"{path} is a folder; name the Python in it" + (f", {inside}" if inside.exists() else "")
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a plain file; name the Python of an environment"
    return "" if os.access(path, os.X_OK) else f"{path} is not executable; `chmod u+x` it, or name another"


def _distrust(python: Path) -> str:
    """Explain how others could change the interpreter or add to its folder; for a link, check both folders."""
    folders = (python.parent, python.resolve(strict=True).parent)
    why = distrust_of_program(python) or next(filter(None, map(distrust_of_searched, folders)), "")
    reason, _, remedy = why.partition("; ")
    return f"{python} is not run, because {reason}; {remedy or 'name one of your own'}" if why else ""
