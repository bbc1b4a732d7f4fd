"""Makes a command job from the arguments of `sae-tui run` or of `sae_tui.run`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.settings.command import CommandJob, name_of
from trainer.contract.settings.job_file import any_job_of
from trainer.contract.settings.typed import as_time_limit, parse_seconds


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
    retry_on: Sequence[int] = (),
    requeue: Sequence[int] = (),
    backend: str | None = None,
    priority: int | None = None,
    share: bool = False,
    metrics: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> CommandJob:
    """Return the job that runs a program; raise `JobFileError` with all wrong settings.

    `memory` is a size like `20GiB`, or bytes. `time` and `grace` are times like `4h`, or seconds. `settings` are
    overrides like `launch.partition=gpu`. A setting that is None has its default.
    """
    variables = [f"{key}={value}" for key, value in env.items()] if isinstance(env, Mapping) else list(env)
    command = {
        "argv": list(argv),
        "folder": os.path.abspath(folder or "."),
        "memory": f"{memory}B" if isinstance(memory, int) else memory,
        "env": variables or None,
        "clean_env": clean_env,
        "stop_signal": stop_signal,
        "grace_s": _seconds(grace, "command.grace_s"),
        "retry_on": list(retry_on) or None,
        "requeue_on": list(requeue) or None,
        "metrics": list(metrics) or None,
    }
    launch = {
        "gpus": None if gpus is None else gpus_setting(gpus),
        "max_restarts": retries,
        "priority": priority,
        "share": share,
        "backend": backend,
        "time_limit": as_time_limit(_seconds(time, "launch.time_limit")) if time else None,
    }
    table = {"kind": CommandJob.kind, "name": name or name_of(argv)}
    job = any_job_of(table | {"command": _given(command), "launch": _given(launch)}, settings)
    assert isinstance(job, CommandJob)
    return job


def gpus_setting(gpus: int | str | Sequence[int]) -> str | list[int]:
    """Return `launch.gpus`: 2 and `"2"` are two GPUs, 0 is the CPU, `[0, 1]` and `"0,1"` are these GPUs."""
    if isinstance(gpus, int) or (isinstance(gpus, str) and gpus.isdecimal()):
        return f"auto:{gpus}" if int(gpus) else "cpu"
    if not isinstance(gpus, str):
        return list(gpus)
    words = gpus.strip().strip("[]").split(",")
    return [int(word) for word in words] if all(word.strip().isdecimal() for word in words) else gpus


def _seconds(value: str | float, path: str) -> float:
    try:
        return parse_seconds(value) if isinstance(value, str) else float(value)
    except ValueError as error:
        raise JobFileError([Problem(path, str(error))]) from None


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
