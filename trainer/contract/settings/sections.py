"""Which settings each section of a job file has: its own and those of the registry entries it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trainer.contract.settings import catalog, extract, job
from trainer.contract.settings.catalog import Entry, KnobsEntry
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.knobs import Knob, knobs_of

# The sections of each kind of job, and those of all.
KINDS: dict[str, dict[str, type[msgspec.Struct]]] = {"train": job.SECTIONS, extract.KIND: extract.SECTIONS}
SECTIONS = {name: section for sections in KINDS.values() for name, section in sections.items()}

# By section: the field that names a registry entry, and that registry; the entry's knobs become part of the section.
CHOSEN: dict[str, tuple[str, Mapping[str, KnobsEntry]]] = {
    "data": ("source", catalog.SOURCES),
    "sae": ("architecture", catalog.ARCHITECTURES),
    "train": ("optimizer", catalog.OPTIMIZERS),
    "launch": ("backend", catalog.LAUNCH_BACKENDS),
}
# The setting that names an entry, by its path, and the registry of what it may name.
REGISTRIES: dict[str, Mapping[str, Entry]] = {
    **{f"{section}.{field}": registry for section, (field, registry) in CHOSEN.items()},
    "parallel.mode": catalog.PARALLEL,
}


def section_knobs(section: str, chosen: str | Sequence[str] | None = None) -> tuple[Knob, ...]:
    """Return the settings of a section, with those of the registry entry, or entries, `chosen` (else the default)."""
    common = knobs_of(SECTIONS[section])
    if section not in CHOSEN:
        return common
    field, registry = CHOSEN[section]
    place = [knob.name for knob in common].index(field) + 1
    words = [chosen] if isinstance(chosen, str) else chosen or [common[place - 1].default]
    own: dict[str, Knob] = {}
    for word in words:
        # Where two entries have a setting of the same name, the first describes it.
        own = {knob.name: knob for knob in knobs_of(registry[word].knobs)} | own if word in registry else own
    return (*common[:place], *own.values(), *common[place:])


def find_knob(path: str) -> Knob | None:
    """Return the setting at a path like `train.lr`, of whichever registry entry; None where there is none."""
    section, _, name = path.rpartition(".")
    if section not in SECTIONS:
        return next((knob for knob in knobs_of(JobConfig) if knob.name == path), None)
    entries = list(CHOSEN[section][1]) if section in CHOSEN else None
    return next((knob for knob in section_knobs(section, entries) if knob.name == name), None)


def choices_of(path: str, knob: Knob) -> tuple[str, ...]:
    """Return the words that a setting is limited to, a closed list or the names of a registry; else empty."""
    return open_choices(path) or knob.choices


def open_choices(path: str) -> tuple[str, ...]:
    """Return what a setting that names a registry entry may be; empty for any other."""
    names = tuple(REGISTRIES.get(path, ()))
    return ("auto", *names) if path == "parallel.mode" else names


def words_of(section: str, raw: Mapping[str, Any]) -> list[str]:
    """Return the names of registry entries in a section's table, one or several; empty where the default applies."""
    word = raw.get(CHOSEN[section][0]) if section in CHOSEN else None
    return [one for one in (word if isinstance(word, list) else [word]) if isinstance(one, str)]
