"""The settings that this version supports; another version of the app requests this list before launching a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.contract.settings.declare import Setting
from trainer.contract.settings.sections import CHOSEN, all_sections, choices_of, section_settings


def known_settings() -> dict[str, list[str]]:
    """Return a dict mapping each setting's path to its allowed keywords, or to [] if any value is allowed."""
    known: dict[str, list[Setting]] = {}
    for section in all_sections():
        for entry in CHOSEN[section][1] if section in CHOSEN else (None,):
            for setting in section_settings(section, entry):
                known.setdefault(f"{section}.{setting.name}", []).append(setting)
    return {path: _words(path, settings) for path, settings in known.items()}


def unknown_settings(table: Mapping[str, Any], known: Mapping[str, list[str]]) -> list[str]:
    """Return the settings and keywords in a job's table that are not in `known`, like `sae.architecture = "topk"`."""
    unknown = []
    for section, keys in table.items():
        for key, value in keys.items() if isinstance(keys, Mapping) else ():
            path = f"{section}.{key}"
            if path not in known:
                unknown.append(path)
            elif known[path]:
                values = value if isinstance(value, list) else [value]
                unknown += [f'{path} = "{word}"' for word in values if word not in known[path]]
    return unknown


def _words(path: str, settings: list[Setting]) -> list[str]:
    choices = [choices_of(path, setting) for setting in settings]
    return sorted({word for words in choices for word in words}) if all(choices) else []
