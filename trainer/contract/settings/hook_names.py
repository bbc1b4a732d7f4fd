"""Other names of the hook that a job file names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.contract.json_file import read_json
from trainer.contract.settings.hooks import names_of_hook
from trainer.contract.settings.tokens_of_data import META


def other_names(hook: str, folder: Path) -> list[str]:
    """Return our name of a hook, TransformerLens's name and the module path, without `hook` itself.

    Only the model knows the module path, and TransformerLens's name for a hook of BERT. Both are in the folder once its
    rows are stored.
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
    """Return a sentence if an SAE belongs to another hook than the rows; "" if it does not or that is unknown.

    Both arguments are facts from a meta.json or an SAE's metadata, which may use different names for the same hook.
    """
    theirs, ours = _places(of_sae), _places(of_data)
    if not theirs or not ours or {*theirs} & {*ours}:
        return ""
    return f"the SAE says that its hook is {theirs[0]}, but the rows are from {ours[0]}"


def _places(facts: dict[str, Any]) -> list[str]:
    given = [facts.get(name) for name in ("hook_name", "hook", "module", "output_module")]
    return [name for text in given if isinstance(text, str) and text for name in names_of_hook(text)]
