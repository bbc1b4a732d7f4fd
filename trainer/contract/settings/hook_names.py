"""The names of a place in a model beside the one that a job file has for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.contract.json_file import read_json
from trainer.contract.settings.hooks import names_of_hook
from trainer.contract.settings.tokens_of_data import META


def other_names(hook: str, folder: Path) -> list[str]:
    """Return ours, TransformerLens's and the module's path, without `hook` itself.

    Of the module only the model knows the path: it is in the folder once its rows are stored.
    """
    meta = read_json(folder / META, dict[str, Any]) or {}
    names = [*names_of_hook(hook), _module(meta)]
    return [name for name in dict.fromkeys(names) if name and name != hook]


def _module(meta: dict[str, Any]) -> str:
    module = meta.get("module")
    if not isinstance(module, str):
        return ""
    return f"{module} (its input)" if meta.get("is_module_input") is True else module
