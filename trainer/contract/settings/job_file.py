"""The job file: `parse_job` reads TOML and reports all problems at once, `dump_job` writes a complete job back.

`load_job` and `job_of` are for trainings, `load_extraction` for jobs with `kind = "extract"`, `load_any` for both. A
list for a setting that takes one value is a sweep: several SAEs trained in one pass over the data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.paths import shipped_data, working_folder
from trainer.contract.printable import CONTROL, is_utf8, printable_toml
from trainer.contract.settings import all_layers, extract, sweep
from trainer.contract.settings.catalog import MIRRORS
from trainer.contract.settings.declare import Setting, cut, settings_of, show
from trainer.contract.settings.extract import ExtractJob, check_extract
from trainer.contract.settings.job import GPU_CHOICES, MIRROR_LISTS, DataSettings, JobConfig
from trainer.contract.settings.job import SECTIONS as OF_TRAINING
from trainer.contract.settings.sections import (
    CHOSEN,
    KINDS,
    SECTIONS,
    find_setting,
    open_choices,
    section_settings,
    words_of,
)
from trainer.contract.settings.sources import StreamSettings
from trainer.contract.settings.toml import parse_toml, read_text
from trainer.contract.settings.typed import parse_value

AnyJob = JobConfig | ExtractJob
# As a data path, this means the sample activations shipped with the app, unless a file has this name.
SAMPLE = "sample"
J = TypeVar("J", JobConfig, ExtractJob)


def parse_job(raw: Mapping[str, Any], bases: Sequence[Path] = ()) -> tuple[JobConfig | None, list[Problem]]:
    """Parse a TOML table into a job; return the job, or None if there are problems, and all problems.

    Hooks without a layer are looked up in relative paths from `bases`, or from the working directory.
    """
    if kind := _kind_problem(raw, "train", "run it with `sae-train extract`"):
        return None, [kind]
    base, axes = sweep.split(all_layers.of_training(raw, bases or [working_folder()]))
    wrong_axes = sweep.problems_of(base, axes)
    problems = _unknown_keys(raw, OF_TRAINING) + wrong_axes
    jobs = []
    for _, table in [("", base)] if wrong_axes else sweep.member_tables(base, axes):
        job, wrong = _parse_one(table)
        jobs.append(job)
        problems += [problem for problem in wrong if problem not in problems]
    if problems or jobs[0] is None:
        return None, problems
    return msgspec.structs.replace(jobs[0], sweep=axes), []


def members(job: JobConfig) -> dict[str, JobConfig]:
    """Return the jobs of a sweep by a label such as "k=16,seed=1"; without a sweep the job itself, under "".

    Settings that a member's architecture or optimizer does not have are omitted from the job and the label. A setting
    shared by several members has one value: the value in the file, or the default of the first member.
    """
    if not job.sweep:
        return {"": job}
    table = to_table(msgspec.structs.replace(job, sweep=()))
    parsed = {label: _parse_one(member)[0] for label, member in sweep.member_tables(table, job.sweep)}
    return {label: member for label, member in parsed.items() if member}


def _parse_one(raw: Mapping[str, Any]) -> tuple[JobConfig | None, list[Problem]]:
    sections, problems = _parse_sections(raw, JobConfig, OF_TRAINING)
    _require_length(sections["data"], raw.get("train", {}), problems)
    return (None if problems else JobConfig(**sections)), problems


def parse_extraction(raw: Mapping[str, Any], bases: Sequence[Path] = ()) -> tuple[ExtractJob | None, list[Problem]]:
    """Parse a TOML table into an extraction, like `parse_job` for a training."""
    if kind := _kind_problem(raw, extract.KIND, "a file without it is a training: run it with `sae-train run`"):
        return None, [kind]
    raw = all_layers.of_extraction(raw, bases or [working_folder()])
    sections, problems = _parse_sections(raw, ExtractJob, extract.SECTIONS)
    problems += _unknown_keys(raw, extract.SECTIONS)
    if problems:
        return None, problems
    job = ExtractJob(**sections)
    wrong = check_extract(job)
    return (None if wrong else job), wrong


def _kind_problem(raw: Mapping[str, Any], wanted: str, remedy: str) -> Problem | None:
    """Return a problem if the kind of a job file is not `wanted`, or None."""
    kind = raw.get("kind", "train")
    if kind == wanted:
        return None
    if kind not in list(KINDS):
        choices = " or ".join(f'"{choice}"' for choice in KINDS)
        return Problem("kind", f"must be {choices}, not {show(kind)}")
    return Problem("kind", f'is "{kind}" and not "{wanted}"; {remedy}')


def _parse_sections(
    raw: Mapping[str, Any], job: type[msgspec.Struct], sections: Mapping[str, type[msgspec.Struct]]
) -> tuple[dict[str, Any], list[Problem]]:
    """Parse the name and the sections of a job; return the values by name, None for invalid ones, and all problems."""
    problems: list[Problem] = []
    (name_setting,) = settings_of(job)
    parsed = {name: _parse_section(name, raw.get(name, {}), problems) for name in sections}
    return {**parsed, "name": _convert(name_setting, "name", raw, problems)}, problems


def load_job(path: str | Path, overrides: Sequence[str] = (), *, read: Callable[[Path], str] = read_text) -> JobConfig:
    """Read a job file and apply `--set` overrides; raise `JobFileError` with all problems.

    A relative data path is resolved against the working directory or, failing that, the job file's folder.
    """
    bases = bases_of(path)
    return with_data_path(job_of(read_toml(Path(path), read), overrides, bases), bases)


def load_extraction(
    path: str | Path, overrides: Sequence[str] = (), *, read: Callable[[Path], str] = read_text
) -> ExtractJob:
    """Read the job file of an extraction and apply `--set` overrides; raise `JobFileError` with all problems.

    Relative paths are resolved against the working directory or, failing that, the job file's folder.
    """
    bases = bases_of(path)
    return extraction_of(read_toml(Path(path), read), overrides, bases).with_paths(bases)


def load_any(path: str | Path, overrides: Sequence[str] = (), *, read: Callable[[Path], str] = read_text) -> AnyJob:
    """Read a job file of any kind and apply `--set` overrides; raise `JobFileError` with all problems."""
    bases = bases_of(path)
    return with_paths(any_job_of(read_toml(Path(path), read), overrides, bases), bases)


def bases_of(path: str | Path) -> list[Path]:
    """Return the base folders for relative paths in a job file: the working directory and the file's folder."""
    here = working_folder()
    return [here, (here / path).parent]


def with_paths(job: AnyJob, bases: Sequence[Path]) -> AnyJob:
    """Return the job with absolute paths, each resolved against the first of `bases` where it exists."""
    return job.with_paths(bases) if isinstance(job, ExtractJob) else with_data_path(job, bases)


def is_extraction(raw: Mapping[str, Any]) -> bool:
    """Return whether a TOML table describes an extraction."""
    return raw.get("kind") == extract.KIND


def parse_any(raw: Mapping[str, Any], bases: Sequence[Path] = ()) -> tuple[AnyJob | None, list[Problem]]:
    """Parse a TOML table into a job of its kind; return the job, or None if there are problems, and all problems."""
    return parse_extraction(raw, bases) if is_extraction(raw) else parse_job(raw, bases)


def any_job_of(raw: dict[str, Any], overrides: Sequence[str] = (), bases: Sequence[Path] = ()) -> AnyJob:
    """Return the job that a TOML table describes, with overrides; raise `JobFileError` with all problems."""
    return extraction_of(raw, overrides, bases) if is_extraction(raw) else job_of(raw, overrides, bases)


def job_of(raw: dict[str, Any], overrides: Sequence[str] = (), bases: Sequence[Path] = ()) -> JobConfig:
    """Return the training that a TOML table describes, with overrides; raise `JobFileError` with all problems."""
    return _whole(*parse_job(_overridden(raw, overrides), bases))


def extraction_of(raw: dict[str, Any], overrides: Sequence[str] = (), bases: Sequence[Path] = ()) -> ExtractJob:
    """Return the extraction that a TOML table describes, with overrides; raise `JobFileError` with all problems."""
    return _whole(*parse_extraction(_overridden(raw, overrides), bases))


def _overridden(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        apply_override(raw, override)
    return raw


def _whole(job: J | None, problems: list[Problem]) -> J:
    if job is None:
        raise JobFileError(problems)
    return job


def with_data_path(job: JobConfig, bases: Sequence[Path]) -> JobConfig:
    """Return the job with absolute data paths, each resolved against the first of `bases` where it exists."""
    settings = job.data.settings
    written = {name: getattr(settings, name) for name in settings.paths}
    absolute = {name: _resolve_each(path, bases) for name, path in written.items() if path is not None}
    for name in settings.hub_paths:
        if os.path.exists(there := _resolve(getattr(settings, name), bases)):
            absolute[name] = there
    return job.replace("data", settings=msgspec.structs.replace(settings, **absolute))


def _resolve_each(paths: str | list[str], bases: Sequence[Path]) -> str | list[str]:
    return _resolve(paths, bases) if isinstance(paths, str) else [_resolve(path, bases) for path in paths]


def _resolve(path: str, bases: Sequence[Path]) -> str:
    candidates = [os.path.abspath(base / os.path.expanduser(path)) for base in bases]
    if wrong := next((candidate for candidate in candidates if not is_utf8(candidate)), None):
        raise JobFileError([Problem("data.path", f"leads to {wrong!a}, which is not UTF-8; rename that folder")])
    if path == SAMPLE:
        candidates.append(str(shipped_data() / SAMPLE))
        return next(filter(os.path.exists, candidates), candidates[-1])
    return next(filter(os.path.exists, candidates), candidates[0])


def read_toml(path: Path, read: Callable[[Path], str] = read_text) -> dict[str, Any]:
    """Read the table of a TOML file; raise `JobFileError` if it cannot be read or parsed."""
    try:
        return parse_toml(read(path))
    except OSError as error:
        raise JobFileError([Problem(str(path), f"cannot be read: {error.strerror}")]) from None
    except ValueError as error:
        raise JobFileError([Problem(str(path), f"is not valid TOML: {error}")]) from None


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Apply an override such as `train.lr=3e-4` to the table; raise `JobFileError` if it has another form."""
    if not is_utf8(override):
        raise JobFileError(
            [Problem("--set", f"takes UTF-8, not {cut(ascii(override))}; set the terminal's encoding to UTF-8")]
        )
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys) or len(keys) > 2:
        raise JobFileError([Problem("--set", f'takes section.key=value, like train.lr=3e-4, not "{cut(override)}"')])
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
    """Return the complete job as a plain TOML table, without settings that are None."""
    table: dict[str, Any] = {"kind": job.kind} if isinstance(job, ExtractJob) else {}
    table["name"] = job.name
    for name in KINDS[job.kind]:
        section = msgspec.structs.asdict(getattr(job, name))
        own = section.pop("settings", None)
        section |= msgspec.structs.asdict(own) if own is not None else {}
        ordered = [setting.name for setting in section_settings(name, _chosen_entry(job, name))]
        table[name] = {key: section[key] for key in ordered if section[key] is not None}
    for axis in job.sweep if isinstance(job, JobConfig) else ():
        name, key = axis.path.split(".")
        table[name][key] = list(axis.values) if len(axis.values) > 1 else axis.values[0]
    return table


def dump_job(job: AnyJob) -> str:
    """Return the job as the text of a TOML file that can be run again."""
    import tomli_w

    return printable_toml(tomli_w.dumps(to_table(job)))


def _chosen_entry(job: AnyJob, section: str) -> str | None:
    return getattr(getattr(job, section), CHOSEN[section][0]) if section in CHOSEN else None


def _parse_section(name: str, raw: Any, problems: list[Problem]) -> msgspec.Struct | None:
    if not isinstance(raw, Mapping):
        problems.append(Problem(name, f"must be a section: write [{name}] and its keys below"))
        return None
    struct = SECTIONS[name]
    extra: dict[str, Any] = {}
    if name in CHOSEN:
        field, registry = CHOSEN[name]
        default = next(setting.default for setting in settings_of(struct) if setting.name == field)
        chosen = raw.get(field, default)
        own = registry[chosen].settings if isinstance(chosen, str) and chosen in registry else None
        extra["settings"] = own
    settings = section_settings(name, words_of(name, raw))
    values = {setting.name: _convert(setting, f"{name}.{setting.name}", raw, problems) for setting in settings}
    if any(problem.path.startswith(f"{name}.") for problem in problems):
        return None
    if extra.get("settings"):
        own_names = extra["settings"].__struct_fields__
        extra["settings"] = extra["settings"](**{key: values.pop(key) for key in own_names})
    return struct(**values, **extra)


def _require_length(data: msgspec.Struct | None, train: Any, problems: list[Problem]) -> None:
    """Report if the data is a stream and the job file does not set the length of the training."""
    if (
        isinstance(data, DataSettings)
        and isinstance(data.settings, StreamSettings)
        and not {"n_tokens", "n_steps"} & {*train}
    ):
        message = "is missing: the data is a stream without an end; set it or train.n_steps"
        problems.append(Problem("train.n_tokens", message))


def _convert(setting: Setting, path: str, raw: Mapping[str, Any], problems: list[Problem]) -> Any:
    value = raw.get(setting.name, setting.default)
    if setting.required and value is None:
        problems.append(Problem(path, f"is missing: {setting.help}"))
        return None
    try:
        value = setting.convert(value)
    except ValueError as error:
        shared = isinstance(value, list) and value and not setting.is_list and not sweep.may_differ(path)
        problems.append(Problem(path, f"{error}; the SAEs of a sweep share it" if shared else str(error)))
        return None
    if path == "name" and (control := CONTROL.search(value)):
        problems.append(Problem(path, f"must have no control characters, but holds {show(control[0])}"))
    choices = open_choices(path)
    if choices and value not in choices:
        listed = " or ".join(f'"{choice}"' for choice in choices)
        problems.append(Problem(path, f"must be {listed}, not {show(value)}"))
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
    # A `pattern` in the annotation would express this, but msgspec 0.19 to 0.22 crashes on one inside a union.
    if isinstance(value, str):
        return re.fullmatch(r"(auto|cpu)(:[1-9][0-9]{0,3})?", value) is not None
    return bool(value) and len(set(value)) == len(value)


def _are_mirrors(value: str | list[str] | None) -> bool:
    names = [value] if isinstance(value, str) else value or []
    return len(set(names)) == len(names) and all(name in MIRRORS for name in names)


def _unknown_keys(raw: Mapping[str, Any], sections: Mapping[str, type[msgspec.Struct]]) -> list[Problem]:
    """Report unknown keys; skip sections whose architecture, optimizer or source is unknown."""
    problems = _unknown(raw, ("kind", "name", *sections), "")
    for section in sections:
        keys = raw.get(section)
        if isinstance(keys, Mapping) and _are_known(section, keys):
            names = [setting.name for setting in section_settings(section, words_of(section, keys))]
            problems += _unknown(keys, names, f"{section}.")
    return problems


def _are_known(section: str, keys: Mapping[str, Any]) -> bool:
    if section not in CHOSEN or CHOSEN[section][0] not in keys:
        return True
    words = words_of(section, keys)
    return bool(words) and all(word in CHOSEN[section][1] for word in words)


def _unknown(raw: Mapping[str, Any], names: Sequence[str], prefix: str) -> list[Problem]:
    return [
        Problem(prefix + cut(key), f"is not a known setting{_suggestion(key, names)}")
        for key in raw
        if key not in names
    ]


def _suggestion(key: str, names: Sequence[str]) -> str:
    # Imported late, to keep waiting supervisors small.
    import difflib

    close = difflib.get_close_matches(key, names, n=1)
    return f'; did you mean "{close[0]}"?' if close else f"; known are {', '.join(names)}"
