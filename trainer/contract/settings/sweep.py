"""Sweeps: if a setting that accepts a single value has a list, several SAEs are trained in one pass over the data.

`split` separates a job's table into the first SAE and the axes; `member_tables` returns a table for each SAE.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.contract.errors import Problem
from trainer.contract.settings.declare import Setting, show
from trainer.contract.settings.hooks import all_named, layer_label, problems_of_hooks, short_names
from trainer.contract.settings.job import HOOK, SweepAxis, Train
from trainer.contract.settings.sections import CHOSEN, section_settings, words_of
from trainer.contract.settings.transcoders import problems_of_layers

# The maximum number of SAEs in a sweep. The SAEs are trained on each batch in turn, so a larger sweep would be no
# faster than two runs, and memory use adds up over all SAEs.
MOST_MEMBERS = 64
# The settings in [train] in which SAEs may differ. SAEs may also differ in all [sae] and optimizer settings.
_OWN = ("lr", "lr_scaling", "lr_tokens", "seed", "optimizer", "warmup_fraction", "decay_fraction", "grad_clip")
# The value of `sae.freeze` for SAEs that are trained in full.
UNFROZEN = "off"
_CHOOSING = {f"{section}.{field}" for section, (field, _) in CHOSEN.items()}

Table = dict[str, Any]


def may_differ(path: str) -> bool:
    """Return whether the SAEs in a sweep may differ in a setting.

    SAEs may differ in the [sae] settings, in the learning settings, and in the hook. All other data settings are
    shared.
    """
    section, _, key = path.partition(".")
    of_learning = section == "train" and (key in _OWN or key not in Train.__struct_fields__)
    return section == "sae" or of_learning or path == HOOK


def split(raw: Mapping[str, Any]) -> tuple[Table, tuple[SweepAxis, ...]]:
    """Return the table for the first SAE, and the sweep axes in the order of their settings.

    If only a later architecture or optimizer in a list has a setting, that setting also becomes an axis, usually with a
    single value.
    """
    base: Table = copy.deepcopy(dict(raw))
    _expand_twin(base)
    axes: list[SweepAxis] = []
    for section in CHOSEN:
        keys = base.get(section)
        if isinstance(keys, dict):
            axes += _axes_of(section, keys)
            base[section] = _first_of(section, keys)
    return base, tuple(axes)


def _expand_twin(base: Table) -> None:
    """Replace `train.random_twin = true` with the sweep that it stands for, unless `sae.freeze` prevents this."""
    train = base.get("train")
    if not (isinstance(train, dict) and train.get("random_twin") is True):
        return
    sae = base.setdefault("sae", {})
    if isinstance(sae, dict) and sae.get("freeze", UNFROZEN) == UNFROZEN:
        sae["freeze"] = [UNFROZEN, "decoder"]
    if isinstance(sae, dict) and isinstance(sae["freeze"], list) and UNFROZEN in sae["freeze"]:
        train["random_twin"] = False


def problems_of(base: Table, axes: Sequence[SweepAxis]) -> list[Problem]:
    """Return the problems with the axes themselves; invalid values are reported when each SAE's table is parsed."""
    problems = [problem for axis in axes for problem in _problems_of_axis(axis)]
    problems += problems_of_layers(base["sae"].get("cross_layer"), axes) if isinstance(base.get("sae"), dict) else []
    paths = [axis.path for axis in axes]
    if "sae.expansion_factor" in paths and ("sae.d_sae" in paths or base["sae"].get("d_sae")):
        problems.append(Problem("sae.expansion_factor", "has no effect if sae.d_sae is set; leave one of them out"))
    if not problems and len(list(itertools.islice(member_tables(base, axes), MOST_MEMBERS + 1))) > MOST_MEMBERS:
        longest = max(axes, key=lambda axis: len(axis.values))
        message = f"makes a sweep of more than {MOST_MEMBERS} SAEs; give fewer values, or split the sweep into two jobs"
        problems.append(Problem(longest.path, message))
    return problems


def _problems_of_axis(axis: SweepAxis) -> list[Problem]:
    if axis.path == HOOK:
        return problems_of_hooks(axis.values, HOOK)
    is_twice = len({_hashable(value) for value in axis.values}) < len(axis.values)
    return [Problem(axis.path, f"has a value twice: {show(axis.values)}")] if is_twice else []


def member_tables(base: Table, axes: Sequence[SweepAxis]) -> Iterator[tuple[str, Table]]:
    """Yield the label and table for each SAE, over all combinations of values.

    Settings that an SAE's architecture or optimizer does not support are ignored.
    """
    choosing = [axis for axis in axes if axis.path in _CHOOSING]
    others = [axis for axis in axes if axis.path not in _CHOOSING]
    several = {axis.path for axis in axes if len(axis.values) > 1}
    short = short_names(next((axis.values for axis in axes if axis.path == HOOK), ()))
    for words in _combinations(choosing):
        table = _with_values(base, words)
        for axis in choosing:
            _drop_foreign(table, axis)
        for values in _combinations([axis for axis in others if _knows(table, axis.path)]):
            named = {path: value for path, value in (words | values).items() if path in several}
            label = _label(named | {HOOK: short[named[HOOK]]} if HOOK in named else named)
            if HOOK in named and isinstance(sae := base.get("sae"), dict) and sae.get("cross_layer") is True:
                label = layer_label(named[HOOK])
            yield label, _with_values(table, values)


def _axes_of(section: str, keys: Table) -> Iterator[SweepAxis]:
    words = words_of(section, keys)
    first = _names(section, words[:1])
    for setting in section_settings(section, words):
        path = f"{section}.{setting.name}"
        values = _values(path, setting, keys.get(setting.name))
        if setting.name in keys and (len(values) > 1 or setting.name not in first):
            yield SweepAxis(path, tuple(values))


def _first_of(section: str, keys: Table) -> Table:
    """Return a section's table for the first SAE, with the first value of each list.

    Settings that the first architecture or optimizer does not support are left out.
    """
    words = words_of(section, keys)
    first = _names(section, words[:1])
    settings = {setting.name: setting for setting in section_settings(section, words)}
    return {
        key: _values(f"{section}.{key}", settings[key], value)[0] if key in settings else value
        for key, value in keys.items()
        if key in first or key not in settings
    }


def _values(path: str, setting: Setting, value: Any) -> list[Any]:
    """Return the values in a list that defines a sweep; return any other value in a one-element list."""
    if path == HOOK:
        return all_named(value)
    several = isinstance(value, list) and bool(value) and may_differ(path)
    return value if several and (not setting.is_list or isinstance(value[0], list)) else [value]


def _combinations(axes: Sequence[SweepAxis]) -> Iterator[Table]:
    """Yield each combination of one value per axis, as a dict mapping paths to values."""
    for values in itertools.product(*(axis.values for axis in axes)):
        yield {axis.path: value for axis, value in zip(axes, values, strict=True)}


def _with_values(table: Table, values: Mapping[str, Any]) -> Table:
    """Return a copy of a job's table with the given values; `values` maps setting paths to values."""
    changed = {key: dict(value) if isinstance(value, dict) else value for key, value in table.items()}
    for path, value in values.items():
        section, key = path.split(".")
        changed[section][key] = value
    return changed


def _drop_foreign(table: Table, axis: SweepAxis) -> None:
    """Remove settings that only other entries on an axis have; keep unknown keys, so that they are reported."""
    section = axis.path.partition(".")[0]
    own = _names(section, words_of(section, table[section]))
    foreign = _names(section, [word for word in axis.values if isinstance(word, str)]) - own
    table[section] = {key: value for key, value in table[section].items() if key not in foreign}


def _knows(table: Table, path: str) -> bool:
    section, key = path.split(".")
    return key in _names(section, words_of(section, table[section]))


def _names(section: str, words: Sequence[str]) -> set[str]:
    return {setting.name for setting in section_settings(section, words)}


def _label(values: Mapping[str, Any]) -> str:
    return ",".join(f"{path.partition('.')[2]}={_in_label(value)}" for path, value in values.items())


def _in_label(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_in_label, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _hashable(value: Any) -> Any:
    """Return a hashable stand-in for a value, so that checking a list of 100,000 values for duplicates is quick."""
    return repr(value) if isinstance(value, list | dict) else value
