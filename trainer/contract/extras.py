"""What the optional packages are good for, whether the trainer has them, and the command that installs them.

Without any of them the app shows GPUs and jobs, and takes 50 MB; with torch's smallest build it takes 1 GB. The trainer
has those of this Python, or of another one that a job names, which has told what it has.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from trainer.contract.errors import UsageError
from trainer.contract.wording import join_words

# What every process of the trainer imports.
OF_TRAINER = ("torch", "numpy", "safetensors")


class Elsewhere(NamedTuple):
    """The packages of another Python: `names` of those that were asked for, None where that is not known.

    `python` is its path. Of its torch the version, "" where that is not known, and what it is built for: "cuda", "hip"
    or "" for neither.
    """

    python: str
    names: frozenset[str] | None = None
    torch_version: str = ""
    torch_runtime: str = ""


_ELSEWHERE: ContextVar[Elsewhere | None] = ContextVar("elsewhere", default=None)


def elsewhere() -> Elsewhere | None:
    """Return what the other Python has in which jobs are judged just now; None where that is this one."""
    return _ELSEWHERE.get()


@contextlib.contextmanager
def judged_by(there: Elsewhere | None) -> Iterator[None]:
    """Judge jobs, in this thread, by what another Python has."""
    token = _ELSEWHERE.set(there)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def is_installed(module: str) -> bool:
    """Tell whether a job could import a module, without importing it; True where that is not known.

    A folder that only has its name does not count.
    """
    if (there := elsewhere()) is not None:
        return there.names is None or module in there.names
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def install(extra: str) -> str:
    """Return the command that adds an extra where jobs are judged, in the way in which that was made."""
    if (there := elsewhere()) is not None:
        return f"{there.python} -m pip install 'sae-tui[{extra}]'"
    return f"{_way_of(Path(sys.prefix))} 'sae-tui[{extra}]'"


def _way_of(prefix: Path) -> str:
    """Return how an environment gets another extra; that of pipx or uv is the program's own, and has no pip."""
    if (prefix / "pipx_metadata.json").exists():
        return "pipx install --force"
    # `uvx` makes them in its cache, where they do not stay.
    is_of_uvx = prefix.parent.name.startswith("archive-v")
    return "uv tool install" if is_of_uvx or (prefix / "uv-receipt.toml").exists() else "pip install"


def missing_of_trainer() -> list[str]:
    """Return which of the modules that the trainer imports are not installed."""
    return [name for name in OF_TRAINER if not is_installed(name)]


def lack_of_trainer() -> str:
    """Return what to install before anything can train or be evaluated, as a sentence; "" where nothing is missing."""
    if not (missing := missing_of_trainer()):
        return ""
    them = "it" if len(missing) == 1 else "them"
    return f"the trainer lacks {join_words(missing)}: `{install('train')}` adds {them}"


def refuse_without_trainer() -> None:
    """Raise `UsageError` with that sentence where something is missing."""
    if lack := lack_of_trainer():
        raise UsageError(lack)
