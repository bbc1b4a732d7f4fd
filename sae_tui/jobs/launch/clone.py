"""Creates jobs from an existing job: with the same or changed settings, or one job per point of a grid."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from sae_tui.gpu.secrets import masked_settings
from sae_tui.jobs.edits import LONGEST_NAME
from sae_tui.jobs.launch.launching import refuse_options_of_others
from sae_tui.jobs.store_access import existing
from trainer.contract.errors import JobFileError, Problem, UserError
from trainer.contract.paths import DataDir
from trainer.contract.printable import CONTROL
from trainer.contract.settings.catalog import TRAINING
from trainer.contract.settings.consent import sets
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import any_job_of, load_any, parse_any, to_table
from trainer.contract.settings.sections import job_class, section_settings, words_of
from trainer.contract.settings.toml import Judged, table_of
from trainer.contract.settings.typed import parse_value
from trainer.contract.trust import distrust_of_file

MOST_AT_ONCE = 1000


def clone_settings(data: DataDir, job_id: int, overrides: Sequence[str] = ()) -> AnyJob:
    """Return a job's settings, with its current name and with `overrides` applied.

    Raise `JobFileError` if an override is invalid.
    """
    file = data.run(job_id).job_file
    if not file.exists():
        return _settings_in_row(data, job_id, overrides)
    judged = Judged()
    job = load_any(file, overrides, read=judged)
    refuse_options_of_others(judged.distrust, job, overrides)
    name = job.name if sets(overrides, "name") else _present_name(data, job_id) or job.name
    return msgspec.structs.replace(job, name=name)


def free_name(name: str, taken: Iterable[str]) -> str:
    """Return a name that is not taken, such as `quick-2` if `quick` is taken, or `quick-3` if both are."""
    names = set(taken)
    if name not in names:
        return name
    first = re.sub(r"-\d+$", "", name)
    stem = first if first in names else name
    endings = (f"-{number}" for number in itertools.count(2))
    free = (stem[: LONGEST_NAME - len(ending)] + ending for ending in endings)
    return next(one for one in free if one not in names)


def launch_line(config: str, name: str) -> str:
    """Return the shell command that launches a job with the same settings, like `sae-tui launch /dev/null --set …`.

    `name` is the job's current name. The empty job file makes the command independent of this machine's files, except
    the data. Raise `UserError` if this version cannot read the settings, or if they contain control characters, which
    could end a paste into a shell and run a command.
    """
    job, _ = parse_any(table_of(config))
    if job is None:
        raise UserError("the job's settings are from another version, so they cannot be written as a command")
    table = to_table(job)
    program = table.get("command", {}).pop("argv", None)
    start = ["sae-tui", "launch", "/dev/null"] if program is None else ["sae-tui", "run", f"--name={name}"]
    named = [] if program is not None else [f"name={_as_override(name)}"]
    kind = [] if job.kind == TRAINING or program is not None else [f"kind={job.kind}"]
    flags = [word for one in (*kind, *named, *_changed(table, job.kind)) for word in ("--set", one)]
    words = [*start, *flags, *(["--", *program] if program else [])]
    # Line breaks are harmless because they are quoted.
    if any(CONTROL.search(word.replace("\n", "")) for word in words):
        raise UserError("the settings contain control characters, so the command is not copied")
    return shlex.join(words)


def has_secrets(config: str) -> bool:
    """Return whether a job's command line or variables may contain secrets."""
    command = table_of(config).get("command")
    settings = {f"command.{name}": value for name, value in command.items()} if isinstance(command, dict) else {}
    return bool(masked_settings(settings) != settings)


def _changed(table: dict[str, Any], kind: str) -> Iterator[str]:
    """Yield each setting that is not at its default, like `sae.k=32`; a sweep's values are written as a list."""
    for section in job_class(kind).sections:
        for setting in section_settings(section, words_of(section, table[section])):
            value = table[section].get(setting.name)
            if value is not None and value != setting.default:
                yield f"{section}.{setting.name}={_as_override(value)}"


def _as_override(value: object) -> str:
    """Format a value for an override; a string is quoted only if it would otherwise be read as another value."""
    is_plain = isinstance(value, str) and parse_value(value) == value
    return str(value) if is_plain else json.dumps(value, ensure_ascii=False)


def _present_name(data: DataDir, job_id: int) -> str:
    """Return a job's current name, which may have changed since its launch, or "" if there is no such job."""
    with contextlib.suppress(UserError), existing(data, job_id) as control:
        return control.job(job_id).name
    return ""


def _settings_in_row(data: DataDir, job_id: int, overrides: Sequence[str]) -> AnyJob:
    """Return the settings stored in a job's row, for a job without a job file.

    The job's folder may have been deleted, or its launch may have been interrupted.
    """
    with existing(data, job_id) as control:
        job = control.job(job_id)
    if not job.config:
        raise UserError(f"job {job_id} has no settings to clone")
    config = any_job_of(table_of(job.config) | {"name": job.name}, overrides)
    refuse_options_of_others(distrust_of_file(data.control_db), config, overrides)
    return config


def grid(axes: Iterable[str]) -> list[list[str]]:
    """Expand axes into all combinations: `sae.k=16,32` and `train.lr=1e-3,3e-4` give four sets of overrides.

    Raise `JobFileError` if an axis is invalid.
    """
    columns = [_values(axis) for axis in axes]
    paths = [column[0].partition("=")[0] for column in columns]
    if twice := next((path for path in paths if paths.count(path) > 1), ""):
        problem = f"{twice} is given twice; write all of its values in one --grid"
        raise JobFileError([Problem("--grid", problem)])
    sets = [list(combination) for combination in itertools.product(*columns)]
    if len(sets) > MOST_AT_ONCE:
        raise JobFileError([Problem("--grid", f"gives {len(sets)} jobs, but at most {MOST_AT_ONCE} are possible")])
    return sets


def name_by_axes(job: AnyJob, axes: Iterable[str]) -> AnyJob:
    """Append the job's value for each grid axis to its name, as in `name k=16 lr=0.001`."""
    paths = [axis.partition("=")[0].strip() for axis in axes]
    table = to_table(job)
    values = "".join(f" {path.rpartition('.')[2]}={_at(table, path)}" for path in paths if path != "name")
    # If the name is too long, truncate it rather than the values, because the jobs differ only in the values.
    return msgspec.structs.replace(job, name=f"{job.name[: max(1, LONGEST_NAME - len(values))]}{values}"[:LONGEST_NAME])


def _at(table: dict[str, Any], path: str) -> Any:
    section, _, key = path.rpartition(".")
    return (table.get(section, {}) if section else table).get(key, "")


def _values(axis: str) -> list[str]:
    path, equals, values = axis.partition("=")
    words = [value.strip() for value in values.strip().strip("[]").split(",") if value.strip()]
    if not equals or not path.strip() or not words:
        raise JobFileError([Problem("--grid", f'takes a setting and values like sae.k=16,32,64, not "{axis}"')])
    return [f"{path.strip()}={value}" for value in words]
