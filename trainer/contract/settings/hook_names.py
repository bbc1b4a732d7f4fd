"""Alternative names for a hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.contract.json_file import read_json
from trainer.contract.settings.hooks import names_of_hook
from trainer.contract.settings.tokens_of_data import META


def other_names(hook: str, folder: Path) -> list[str]:
    """Return a hook's other names, out of three: our name, its TransformerLens name and its module path.

    The module path, and the TransformerLens name for a hook in BERT, can be determined only from the model. These two
    names are recorded in `folder` once the hook's rows have been stored.
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
    """Return a sentence if an SAE and its rows belong to different hooks; "" if the hooks match or are unknown.

    Each argument is the content of a meta.json or an SAE's metadata; the two may use different names for a hook.
    """
    theirs, ours = _places(of_sae), _places(of_data)
    if not theirs or not ours or {*theirs} & {*ours}:
        return ""
    return f"according to the SAE, its hook is {theirs[0]}, but the rows are from {ours[0]}"


def _places(facts: dict[str, Any]) -> list[str]:
    given = [facts.get(name) for name in ("hook_name", "hook", "module", "output_module")]
    return [name for text in given if isinstance(text, str) and text for name in names_of_hook(text)]
