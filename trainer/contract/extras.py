"""What the optional packages are good for, whether they are here, and the command that installs them.

Without any of them the app shows GPUs and jobs; torch alone is fifty times as large as all that it needs for that.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from trainer.contract.errors import UsageError
from trainer.contract.wording import join_words

# What every process of the trainer imports.
_TRAINER = ("torch", "numpy", "safetensors")
# How the tools that give a program an environment of its own mark it, and how each adds an extra there.
_OWN_ENVIRONMENT = {"uv-receipt.toml": "uv tool install", "pipx_metadata.json": "pipx install --force"}


def is_installed(module: str) -> bool:
    """Tell whether a module can be imported, without importing it; a folder that only has its name does not count."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def install(extra: str) -> str:
    """Return the command that adds an extra to this installation, in the way in which it was made."""
    prefix = Path(sys.prefix)
    ways = (way for mark, way in _OWN_ENVIRONMENT.items() if (prefix / mark).exists())
    return f"{next(ways, 'pip install')} 'sae-tui[{extra}]'"


def missing_of_trainer() -> list[str]:
    """Return which of the modules that the trainer imports are not installed."""
    return [name for name in _TRAINER if not is_installed(name)]


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
