"""The names of a place in a model beside the one that a job file has for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.contract.json_file import read_json
from trainer.contract.settings.hooks import names_of_hook
from trainer.contract.settings.tokens_of_data import META


def other_names(hook: str, folder: Path) -> list[str]:
    """Return ours, TransformerLens's and the module's path, without `hook` itself.

    Of the module only the model knows the path, and what TransformerLens calls a place in a BERT: these are in the
    folder once its rows are stored.
    """
    meta = read_json(folder / META, dict[str, Any]) or {}
    ours, stored = meta.get("hook"), meta.get("hook_name")
    names = [ours, stored] if isinstance(ours, str) and isinstance(stored, str) else names_of_hook(hook)
    return [name for name in dict.fromkeys([*names, _module(meta)]) if name and name != hook]


def _module(meta: dict[str, Any]) -> str:
    module = meta.get("module")
    if not isinstance(module, str):
        return ""
    return f"{module} (its input)" if meta.get("is_module_input") is True else module


def other_place(of_sae: dict[str, Any], of_data: dict[str, Any]) -> str:
    """Say in a sentence that an SAE is of another place in a model than rows; "" where it is not, or nobody knows.

    Both are facts as a meta.json or an SAE's metadata have them: the same place may have a name in each dialect.
    """
    theirs, ours = _places(of_sae), _places(of_data)
    if not theirs or not ours or {*theirs} & {*ours}:
        return ""
    return f"the SAE says that it is of {theirs[0]}, and the rows are of {ours[0]}"


def _places(facts: dict[str, Any]) -> list[str]:
    given = [facts.get(name) for name in ("hook_name", "hook", "module", "output_module")]
    return [name for text in given if isinstance(text, str) and text for name in names_of_hook(text)]
