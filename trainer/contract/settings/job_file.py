"""Reads and writes job files: `parse_job` parses a TOML table and reports all problems at once.

`parse_job`, `load_job` and `job_of` handle training jobs; `parse_any`, `load_any` and `any_job_of` handle any kind of
job. If a setting that accepts a single value has a list of values, the job is a sweep: it trains several SAEs in one
pass over the data. `dump_job` returns a complete job as TOML text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.paths import working_folder
from trainer.contract.printable import CONTROL, is_utf8, printable_toml
from trainer.contract.settings import sweep
from trainer.contract.settings.catalog import KINDS, MIRRORS, TRAINING
from trainer.contract.settings.declare import Setting, either, settings_of, show
from trainer.contract.settings.job import GPU_CHOICES, MIRROR_LISTS, AnyJob, J, JobConfig
from trainer.contract.settings.sections import (
    CHOSEN,
    all_sections,
    find_setting,
    job_class,
    open_choices,
    section_settings,
    words_of,
)
from trainer.contract.settings.toml import parse_toml, read_text
from trainer.contract.settings.typed import cut, parse_value

Read = Callable[[Path], str]


def parse_job(raw: Mapping[str, Any], bases: Sequence[Path] = ()) -> tuple[JobConfig | None, list[Problem]]:
    """Convert a TOML table to a training job; see `parse_as`."""
    return parse_as(JobConfig, raw, bases)


def parse_any(raw: Mapping[str, Any], bases: Sequence[Path] = ()) -> tuple[AnyJob | None, list[Problem]]:
    """Convert a TOML table to a job of the kind specified in the table; see `parse_as`."""
    return parse_as(class_of(raw), raw, bases)


def parse_as(of: type[J], raw: Mapping[str, Any], bases: Sequence[Path] = ()) -> tuple[J | None, list[Problem]]:
    """Convert a TOML table to a job of this kind; return the job (None if there are problems) and all problems.

    To find the layers for a hook without a layer, relative paths are resolved against `bases` or, by default, against
    the working directory.
    """
    if wrong_kind := _kind_problem(raw, of.kind):
        return None, [wrong_kind]
    base, axes = sweep.split(of.with_all_layers(raw, bases or [working_folder()]))
    wrong_axes = sweep.problems_of(base, axes)
    problems = _unknown_keys(raw, of.sections) + wrong_axes
    jobs = []
    for _, table in [("", base)] if wrong_axes else sweep.member_tables(base, axes):
        job, wrong = _parse_one(of, table)
        jobs.append(job)
        problems += [problem for problem in wrong if problem not in problems]
    if problems or jobs[0] is None:
        return None, problems
    return msgspec.structs.replace(jobs[0], sweep=axes), []


def class_of(raw: Mapping[str, Any]) -> type[AnyJob]:
    """Return the class for the kind of job in a TOML table; for an unknown kind, return the class for training jobs."""
    kind = raw.get("kind", TRAINING)
    return job_class(kind if kind in list(KINDS) else TRAINING)


def members(job: J) -> dict[str, J]:
    """Return a dict mapping labels such as "k=16,seed=1" to the jobs in a sweep.

    Without a sweep, the dict contains the job itself with the label "". Settings that a member's architecture or
    optimizer does not support are omitted from its job and label. If several members have a setting, they all use its
    value in the file or, if it is not set there, the first member's default.
    """
    if not job.sweep:
        return {"": job}
    table = to_table(msgspec.structs.replace(job, sweep=()))
    parsed = {label: _parse_one(type(job), member)[0] for label, member in sweep.member_tables(table, job.sweep)}
    return {label: member for label, member in parsed.items() if member}


def _parse_one(of: type[J], raw: Mapping[str, Any]) -> tuple[J | None, list[Problem]]:
    problems: list[Problem] = []
    (name_setting,) = settings_of(of)
    sections: dict[str, Any] = {name: _parse_section(name, raw.get(name, {}), problems) for name in of.sections}
    name = _convert(name_setting, "name", raw, problems)
    problems += of.conflicts(sections, raw)
    return (None if problems else of(**sections, name=name)), problems


def _kind_problem(raw: Mapping[str, Any], wanted: str) -> Problem | None:
    """Return a problem if a job file's kind is not `wanted`, otherwise None."""
    kind = raw.get("kind", TRAINING)
    if kind == wanted:
        return None
    if kind not in list(KINDS):
        choices = either(f'"{choice}"' for choice in KINDS)
        return Problem("kind", f"must be {choices}, not {show(kind)}")
    return Problem("kind", f'is "{kind}" and not "{wanted}"; {KINDS[kind].run_by}')


def load_job(path: str | Path, overrides: Sequence[str] = (), *, read: Read = read_text) -> JobConfig:
    """Read the job file for a training job; see `load_as`."""
    return load_as(JobConfig, path, overrides, read=read)


def load_any(path: str | Path, overrides: Sequence[str] = (), *, read: Read = read_text) -> AnyJob:
    """Read a job file of any kind; see `load_as`."""
    bases = bases_of(path)
    return any_job_of(read_toml(Path(path), read), overrides, bases).with_paths(bases)


def load_as(of: type[J], path: str | Path, overrides: Sequence[str] = (), *, read: Read = read_text) -> J:
    """Read a job file of this kind and apply `--set` overrides; raise `JobFileError` with all problems.

    Relative paths are resolved against the working directory or, if they do not exist there, against the job file's
    folder.
    """
    bases = bases_of(path)
    raw = _overridden(read_toml(Path(path), read), overrides)
    return _whole(*parse_as(of, raw, bases)).with_paths(bases)


def bases_of(path: str | Path) -> list[Path]:
    """Return the base folders for relative paths in a job file: the working directory and the file's own folder."""
    here = working_folder()
    return [here, (here / path).parent]


def any_job_of(raw: dict[str, Any], overrides: Sequence[str] = (), bases: Sequence[Path] = ()) -> AnyJob:
    """Return the job described by a TOML table, with overrides; raise `JobFileError` with all problems."""
    return _whole(*parse_any(_overridden(raw, overrides), bases))


def job_of(raw: dict[str, Any], overrides: Sequence[str] = (), bases: Sequence[Path] = ()) -> JobConfig:
    """Return the training job described by a TOML table, with overrides; raise `JobFileError` with all problems."""
    return _whole(*parse_job(_overridden(raw, overrides), bases))


def _overridden(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        apply_override(raw, override)
    return raw


def _whole(job: J | None, problems: list[Problem]) -> J:
    if job is None:
        raise JobFileError(problems)
    return job


def read_toml(path: Path, read: Read = read_text) -> dict[str, Any]:
    """Read the table from a TOML file; raise `JobFileError` if it cannot be read or parsed."""
    try:
        return parse_toml(read(path))
    except OSError as error:
        raise JobFileError([Problem(str(path), f"cannot be read: {error.strerror}")]) from None
    except ValueError as error:
        raise JobFileError([Problem(str(path), f"is not valid TOML: {error}")]) from None


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Apply an override such as `train.lr=3e-4` to a table; raise `JobFileError` if the override is malformed."""
    if not is_utf8(override):
        raise JobFileError(
            [Problem("--set", f"expects UTF-8, not {cut(ascii(override))}; set the terminal's encoding to UTF-8")]
        )
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys) or len(keys) > 2:
        raise JobFileError([Problem("--set", f'expects section.key=value, like train.lr=3e-4, not "{cut(override)}"')])
    table = raw
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise JobFileError([Problem("--set", f'"{cut(key)}" is not a section of the job file')])
    table[keys[-1]] = _read_value(path.strip(), text)


def _read_value(path: str, text: str) -> Any:
    setting = find_setting(path)
    try:
        return setting.read(text, several=sweep.may_differ(path)) if setting else parse_value(text)
    except ValueError as error:
        raise JobFileError([Problem(path, str(error))]) from None


def to_table(job: AnyJob) -> dict[str, Any]:
    """Return the complete job as a plain TOML table, omitting settings that are None."""
    table: dict[str, Any] = {} if job.kind == TRAINING else {"kind": job.kind}
    table["name"] = job.name
    for name in job.sections:
        section = msgspec.structs.asdict(getattr(job, name))
        own = section.pop("settings", None)
        section |= msgspec.structs.asdict(own) if own is not None else {}
        ordered = [setting.name for setting in section_settings(name, _chosen_entry(job, name))]
        table[name] = {key: section[key] for key in ordered if section[key] is not None}
    for axis in job.sweep:
        name, key = axis.path.split(".")
        table[name][key] = list(axis.values) if len(axis.values) > 1 else axis.values[0]
    return table


def dump_job(job: AnyJob) -> str:
    """Return the contents of a TOML file with which the same job can be rerun."""
    import tomli_w

    return printable_toml(tomli_w.dumps(to_table(job)))


def _chosen_entry(job: AnyJob, section: str) -> str | None:
    return getattr(getattr(job, section), CHOSEN[section][0]) if section in CHOSEN else None


def _parse_section(name: str, raw: Any, problems: list[Problem]) -> msgspec.Struct | None:
    if not isinstance(raw, Mapping):
        problems.append(Problem(name, f"must be a section: write [{name}] and its keys below"))
        return None
    struct = all_sections()[name]
    extra: dict[str, Any] = {}
    if name in CHOSEN:
        field, registry = CHOSEN[name]
        default = next(setting.default for setting in settings_of(struct) if setting.name == field)
        chosen = raw.get(field, default)
        own = registry[chosen].settings if isinstance(chosen, str) and chosen in registry else None
        extra["settings"] = own
    settings = section_settings(name, words_of(name, raw))
    if extra.get("settings", struct) is None:
        # No entry is known, so it is unknown which settings are required.
        settings = tuple(setting for setting in settings if setting.name in raw or not setting.required)
    values = {setting.name: _convert(setting, f"{name}.{setting.name}", raw, problems) for setting in settings}
    if any(problem.path.startswith(f"{name}.") for problem in problems):
        return None
    if extra.get("settings"):
        own_names = extra["settings"].__struct_fields__
        extra["settings"] = extra["settings"](**{key: values.pop(key) for key in own_names})
    return struct(**values, **extra)


def _convert(setting: Setting, path: str, raw: Mapping[str, Any], problems: list[Problem]) -> Any:
    value = raw.get(setting.name, setting.default)
    if setting.required and value is None:
        problems.append(Problem(path, f"is missing: {setting.help}"))
        return None
    choices = open_choices(path)
    try:
        if choices and value is not None and not isinstance(value, list) and value not in choices:
            raise ValueError(f"must be {' or '.join(map(show, choices))}, not {show(value)}")
        value = setting.convert(value)
    except ValueError as error:
        shared = isinstance(value, list) and value and not setting.is_list and not sweep.may_differ(path)
        problems.append(Problem(path, f"{error}; all SAEs of a sweep share this setting" if shared else str(error)))
        return None
    if path == "name" and (control := CONTROL.search(value)):
        problems.append(Problem(path, f"must not contain control characters, but contains {show(control[0])}"))
    if path == "name" and not is_utf8(value):
        problems.append(Problem(path, f"must be UTF-8, not {show(ascii(value))}"))
    if path == "train.mirror" and not _are_mirrors(value):
        problems.append(Problem(path, f"must be {MIRROR_LISTS}, each once, not {show(value)}"))
    if path == "launch.gpus" and not _is_gpu_choice(value):
        twice = sorted({index for index in value if value.count(index) > 1}) if isinstance(value, list) else []
        wrong = (
            f"GPU {twice[0]} is given twice in {show(value)}" if twice else f"must be {GPU_CHOICES}, not {show(value)}"
        )
        problems.append(Problem(path, wrong))
    return value


def _is_gpu_choice(value: str | list[int]) -> bool:
    # A `pattern` in the annotation would be simpler, but msgspec 0.19 to 0.22 crashes if a union contains a pattern.
    if isinstance(value, str):
        return re.fullmatch(r"(auto|cpu)(:[1-9][0-9]{0,3})?", value) is not None
    return bool(value) and len(set(value)) == len(value)


def _are_mirrors(value: str | list[str] | None) -> bool:
    names = [value] if isinstance(value, str) else value or []
    return len(set(names)) == len(names) and all(name in MIRRORS for name in names)


def _unknown_keys(raw: Mapping[str, Any], sections: Mapping[str, type[msgspec.Struct]]) -> list[Problem]:
    """Report unknown keys; if the architecture, optimizer or source is unknown, the keys of all of them are known."""
    problems = _unknown(raw, ("kind", "name", *sections), "")
    for section in sections:
        keys = raw.get(section)
        if isinstance(keys, Mapping):
            names = [setting.name for setting in section_settings(section, words_of(section, keys))]
            problems += _unknown(keys, names, f"{section}.")
    return problems


def _unknown(raw: Mapping[str, Any], names: Sequence[str], prefix: str) -> list[Problem]:
    return [
        Problem(prefix + cut(key), f"is not a known setting{_suggestion(key, names)}")
        for key in raw
        if key not in names
    ]


def _suggestion(key: str, names: Sequence[str]) -> str:
    # Import late because queue processes must use little memory.
    import difflib

    close = difflib.get_close_matches(key, names, n=1)
    return f'; did you mean "{close[0]}"?' if close else f"; the known settings are {', '.join(names)}"
