"""The settings in each section of a job file, including the settings of the registry entries that the section names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trainer.contract.settings import catalog
from trainer.contract.settings.catalog import Entry, SettingsEntry
from trainer.contract.settings.declare import Setting, settings_of
from trainer.contract.settings.job import AnyJob

# Maps each section to the field that names a registry entry, and to the registry. The entry's settings become settings
# in the section.
CHOSEN: dict[str, tuple[str, Mapping[str, SettingsEntry]]] = {
    "data": ("source", catalog.SOURCES),
    "sae": ("architecture", catalog.ARCHITECTURES),
    "train": ("optimizer", catalog.OPTIMIZERS),
    "launch": ("backend", catalog.LAUNCH_BACKENDS),
}
# Maps the path of each setting that names a registry entry to the registry.
REGISTRIES: dict[str, Mapping[str, Entry]] = {
    **{f"{section}.{field}": registry for section, (field, registry) in CHOSEN.items()},
    "parallel.mode": catalog.PARALLEL,
}


def job_class(kind: str) -> type[AnyJob]:
    """Return the class for a kind of job."""
    loaded: type[AnyJob] = catalog.KINDS[kind].load()
    return loaded


def all_sections() -> dict[str, type[msgspec.Struct]]:
    """Return a dict mapping the section names for all kinds of jobs to the section classes."""
    return {name: section for kind in catalog.KINDS for name, section in job_class(kind).sections.items()}


def section_settings(section: str, chosen: str | Sequence[str] | None = None) -> tuple[Setting, ...]:
    """Return a section's settings, including the settings of the chosen or default registry entries.

    If an entry is unknown, the settings of all entries are included, because the section could mean any of them.
    """
    common = settings_of(all_sections()[section])
    if section not in CHOSEN:
        return common
    field, registry = CHOSEN[section]
    place = [setting.name for setting in common].index(field) + 1
    words = [chosen] if isinstance(chosen, str) else chosen or [common[place - 1].default]
    entries = [entry for word in words for entry in ([registry[word]] if word in registry else registry.values())]
    own: dict[str, Setting] = {}
    for entry in entries:
        # If several entries have a setting with the same name, the first entry's setting is used.
        own = {setting.name: setting for setting in settings_of(entry.settings)} | own
    return (*common[:place], *own.values(), *common[place:])


def find_setting(path: str) -> Setting | None:
    """Return the setting at a path such as `train.lr`, in the section or any of its registry entries, or None."""
    section, _, name = path.rpartition(".")
    if section not in all_sections():
        return next((setting for setting in settings_of(AnyJob) if setting.name == path), None)
    entries = list(CHOSEN[section][1]) if section in CHOSEN else None
    return next((setting for setting in section_settings(section, entries) if setting.name == name), None)


def choices_of(path: str, setting: Setting) -> tuple[str, ...]:
    """Return the keywords that a setting accepts, fixed or from a registry; empty if it accepts other values."""
    return open_choices(path) or setting.choices


def meanings_of(path: str) -> dict[str, str]:
    """Return a dict mapping each registry entry that a setting may name to a sentence describing it."""
    return {name: entry.summary for name, entry in REGISTRIES.get(path, {}).items()}


def open_choices(path: str) -> tuple[str, ...]:
    """Return the allowed values for a setting naming a registry entry; empty for other settings."""
    names = tuple(REGISTRIES.get(path, ()))
    return ("auto", *names) if path == "parallel.mode" else names


def words_of(section: str, raw: Mapping[str, Any]) -> list[str]:
    """Return the names of registry entries in a section's table; empty if the default entry applies.

    A value that is not a string is returned as "", which is no entry's name.
    """
    word = raw.get(CHOSEN[section][0]) if section in CHOSEN else None
    words = word if isinstance(word, list) else [] if word is None else [word]
    return [one if isinstance(one, str) else "" for one in words]
