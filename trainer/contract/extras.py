"""Checks whether the trainer's optional packages are installed, and returns the command to install them.

Without these packages, the app still shows GPUs and jobs. They are optional because of their size: the app needs 50 MB
of disk space, and the smallest torch build needs 1 GB. The trainer uses the packages installed for this Python, or for
another Python interpreter if a job names one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from trainer.contract.errors import UserError
from trainer.contract.wording import join_words

# Packages imported by every trainer process.
OF_TRAINER = ("torch", "numpy", "safetensors")


class OtherInterpreter(NamedTuple):
    """The packages installed for another Python interpreter.

    `python` is the path of the interpreter. `names` contains the requested packages that are installed there, or is
    None if unknown. `torch_version` is "" if unknown. `torch_runtime` is the platform for which that interpreter's
    torch is built: "cuda", "hip", or "" for neither.
    """

    python: str
    names: frozenset[str] | None = None
    torch_version: str = ""
    torch_runtime: str = ""


_ELSEWHERE: ContextVar[OtherInterpreter | None] = ContextVar("elsewhere", default=None)


def elsewhere() -> OtherInterpreter | None:
    """Return the other interpreter whose packages jobs are currently checked against, or None for this one."""
    return _ELSEWHERE.get()


@contextlib.contextmanager
def judged_by(there: OtherInterpreter | None) -> Iterator[None]:
    """Check jobs against another Python's packages within this context."""
    token = _ELSEWHERE.set(there)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def is_installed(module: str) -> bool:
    """Return whether a job could import a module, without importing it; True if unknown.

    A plain folder with the module's name does not count as the module.
    """
    if (there := elsewhere()) is not None:
        return there.names is None or module in there.names
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def install(extra: str) -> str:
    """Return the command to install a sae-tui extra into the Python that jobs are checked against."""
    if (there := elsewhere()) is not None:
        return f"{there.python} -m pip install 'sae-tui[{extra}]'"
    return f"{_way_of(Path(sys.prefix))} 'sae-tui[{extra}]'"


def _way_of(prefix: Path) -> str:
    """Return the install command for an environment; environments created by pipx or uv have no pip."""
    if (prefix / "pipx_metadata.json").exists():
        return "pipx install --force"
    # `uvx` creates temporary environments in its cache.
    is_of_uvx = prefix.parent.name.startswith("archive-v")
    return "uv tool install" if is_of_uvx or (prefix / "uv-receipt.toml").exists() else "pip install"


def missing_of_trainer() -> list[str]:
    """Return the modules required by the trainer that are not installed."""
    return [name for name in OF_TRAINER if not is_installed(name)]


def lack_of_trainer() -> str:
    """Return a sentence naming the packages missing for training and evaluation; "" if none are missing."""
    if not (missing := missing_of_trainer()):
        return ""
    them = "it" if len(missing) == 1 else "them"
    return f"the trainer lacks {join_words(missing)}: `{install('train')}` adds {them}"


def refuse_without_trainer() -> None:
    """Raise `UserError` if a module that the trainer requires is missing."""
    if lack := lack_of_trainer():
        raise UserError(lack)
