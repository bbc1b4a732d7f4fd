"""Creates a command job from the arguments of `sae-tui run` or `sae_tui.run`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from sae_tui.jobs.launch.kinds.command import name_of_command
from trainer.contract.errors import JobFileError, Problem
from trainer.contract.settings.command import CommandJob
from trainer.contract.settings.consent import sets
from trainer.contract.settings.job_file import any_job_of
from trainer.contract.settings.typed import TIMES, as_time_limit, parse_seconds

# A longer time limit is assumed to be a typing mistake.
_LONGEST_S = 10_000 * 86_400
# Maps each setting to the argument that sets it, so that errors can name the argument.
_ARGUMENTS = {
    "name": "name",
    "launch.gpus": "gpus",
    "launch.time_limit": "time",
    "launch.max_restarts": "retries",
    "launch.priority": "priority",
    "launch.share": "share",
    "launch.backend": "backend",
    "command.memory": "memory",
    "command.env": "env",
    "command.folder": "folder",
    "command.clean_env": "clean_env",
    "command.stop_signal": "stop_signal",
    "command.grace_s": "grace",
    "command.retry_on": "retry_on",
    "command.requeue_on": "requeue",
    "command.metrics": "metrics",
}


def command_job(
    argv: Sequence[str],
    *,
    gpus: int | str | Sequence[int] | None = None,
    memory: str | int | None = None,
    name: str | None = None,
    time: str | float | None = None,
    env: Mapping[str, object] | Sequence[str] = (),
    folder: str | os.PathLike[str] | None = None,
    clean_env: bool = False,
    stop_signal: str = "TERM",
    grace: str | float = 60.0,
    retries: int = 0,
    retry_on: int | Sequence[int] = (),
    requeue: int | Sequence[int] = (),
    backend: str | None = None,
    priority: int | None = None,
    share: bool = False,
    metrics: str | Sequence[str] = (),
    settings: str | Sequence[str] = (),
) -> CommandJob:
    """Return the job that runs a program; raise a `JobFileError` that lists all invalid settings.

    `memory` is a size like `20GiB` or a number of bytes. `time` and `grace` are times like `4h` or numbers of seconds.
    `settings` are overrides like `launch.partition=gpu`. A setting that is None keeps its default.
    """
    command = {
        "argv": list(argv),
        "folder": _folder(folder),
        "memory": f"{memory}B" if isinstance(memory, int) and not isinstance(memory, bool) else memory,
        "env": _variables(env) or None,
        "clean_env": clean_env,
        "stop_signal": stop_signal,
        "grace_s": _seconds(grace, "command.grace_s"),
        "retry_on": listed(retry_on) or None,
        "requeue_on": listed(requeue) or None,
        "metrics": listed(metrics) or None,
    }
    launch = {
        "gpus": None if gpus is None else gpus_setting(gpus),
        "max_restarts": retries,
        "priority": priority,
        "share": share,
        "backend": backend,
        "time_limit": None if time is None else _time_limit(time),
    }
    table = {"kind": CommandJob.kind, "name": name or name_of_command(argv)}
    job = any_job_of(table | {"command": _given(command), "launch": _given(launch)}, listed(settings))
    assert isinstance(job, CommandJob)
    return job


@contextmanager
def named_as_arguments(prefix: str = "", *, overrides: Sequence[str] = (), is_usage: bool = True) -> Iterator[None]:
    """Within the context, make a `JobFileError` name arguments instead of settings: `--time`, not `launch.time_limit`.

    A setting given by one of the `overrides` keeps its name.
    """
    try:
        yield
    except JobFileError as error:
        problems = (replace(problem, path=_argument(problem.path, prefix, overrides)) for problem in error.problems)
        raise JobFileError(problems, is_usage=is_usage) from None


def _argument(path: str, prefix: str, overrides: Sequence[str]) -> str:
    name = _ARGUMENTS.get(path)
    if name is None or sets(overrides, path):
        return path
    return prefix + name.replace("_", "-") if prefix else name


def gpus_setting(gpus: object) -> object:
    """Return the value of `launch.gpus`: 2 or `"2"` is two GPUs, 0 the CPU, and `[0, 1]` or `"0,1"` GPUs 0 and 1."""
    if isinstance(gpus, str):
        words = gpus.strip().strip("[]").split(",")
        if gpus.isdecimal():
            return gpus_setting(int(gpus))
        return [int(word) for word in words] if all(word.strip().isdecimal() for word in words) else gpus
    if isinstance(gpus, int) and not isinstance(gpus, bool) and gpus >= 0:
        return f"auto:{gpus}" if gpus else "cpu"
    return list(gpus) if isinstance(gpus, Iterable) else gpus


def listed(values: Any) -> list[Any]:
    """Return values as a list; a single number or string becomes a list of one value."""
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]


def _time_limit(time: str | float) -> str:
    seconds = _seconds(time, "launch.time_limit")
    if not 0 < seconds <= _LONGEST_S:
        problem = f"must be longer than 0 s and at most {_LONGEST_S // 86_400:,} days, not {time}"
        raise JobFileError([Problem("launch.time_limit", problem)])
    return as_time_limit(seconds)


def _seconds(value: str | float, path: str) -> float:
    try:
        seconds = parse_seconds(value) if isinstance(value, str) else float(value)
    except (ValueError, TypeError):
        seconds = math.nan
    seconds = math.nan if isinstance(value, bool) else seconds
    if math.isnan(seconds):
        raise JobFileError([Problem(path, f"must be {TIMES} or a number of seconds, not {value}")])
    return seconds


def _folder(folder: str | os.PathLike[str] | None) -> str:
    try:
        return os.path.abspath(os.fsdecode(folder or "."))
    except TypeError:
        raise JobFileError([Problem("command.folder", f"must be a path, not {folder!r}")]) from None


def _variables(env: Mapping[str, object] | Sequence[str]) -> list[str]:
    if not isinstance(env, Mapping):
        return listed(env)
    if without := [name for name, value in env.items() if value is None]:
        raise JobFileError([Problem("command.env", f"{without[0]} has no value; leave it out")])
    if wrong := [name for name in env if "=" in name]:
        raise JobFileError([Problem("command.env", f'must be a name without "=", not "{wrong[0]}"')])
    return [f"{name}={value}" for name, value in env.items()]


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
