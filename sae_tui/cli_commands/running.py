"""`sae-tui run`: launches any program as a job."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from sae_tui.cli_commands.context import CommandContext, gpus_value
from sae_tui.cli_commands.launching import launch_all
from sae_tui.cli_commands.output import say, show_json
from sae_tui.jobs.edits import LONGEST_NAME
from sae_tui.jobs.launch import adopt as adopting
from trainer.contract.errors import UsageError
from trainer.contract.exits import Exit
from trainer.contract.settings.command import CommandJob
from trainer.contract.settings.job_file import any_job_of
from trainer.contract.settings.typed import as_time_limit


def run(context: CommandContext, flags: argparse.Namespace) -> int:
    """Record a command, or one command for each combination of `--grid` and `--array`, and return."""
    argv = _argv(flags)
    jobs = [_job(flags, argv, values) for values in _combinations(flags.grid)]
    return launch_all(context, flags, jobs)


def adopt(context: CommandContext, flags: argparse.Namespace) -> int:
    """Make a job of a running process of this user."""
    source = context.gpus.source_name
    job_id = adopting.adopt(
        context.data, flags.pid, context.gpus.samples, gpu_source=source, name=flags.name or "", tags=flags.tag
    )
    message = f"process {flags.pid} is job {job_id} now; `sae-tui job {job_id}` shows it"
    if context.as_json:
        show_json({"id": job_id, "message": message})
    else:
        say(message)
    return Exit.DONE


def _argv(flags: argparse.Namespace) -> list[str]:
    """Return the program and its arguments."""
    argv = flags.argv[1:] if flags.argv[:1] == ["--"] else flags.argv
    if flags.shell and argv:
        raise UsageError("--shell and a command after -- are both given; give only one of them")
    if not (argv or flags.shell):
        raise UsageError("there is no command; write it after --, as in `sae-tui run --gpus 1 -- python train.py`")
    return ["/bin/sh", "-c", flags.shell] if flags.shell else argv


def _job(flags: argparse.Namespace, argv: Sequence[str], values: Mapping[str, str]) -> CommandJob:
    words = [_fill(word, values) for word in argv]
    command: dict[str, Any] = {
        "argv": words,
        "folder": os.path.abspath(flags.folder or "."),
        "memory": flags.memory,
        "env": flags.env or None,
        "clean_env": flags.clean_env,
        "stop_signal": flags.stop_signal,
        "grace_s": flags.grace,
        "retry_on": flags.retry_on or None,
        "requeue_on": flags.requeue or None,
        "metrics": flags.metrics or None,
    }
    launch = {
        "max_restarts": flags.retries,
        "priority": flags.priority,
        "share": flags.share,
        "backend": flags.backend,
        "time_limit": as_time_limit(flags.time) if flags.time else None,
    }
    table: dict[str, Any] = {"kind": CommandJob.kind, "name": _name(flags, words, values)}
    table |= {"command": _given(command), "launch": _given(launch)}
    gpus = [f"launch.gpus={_gpus(flags.gpus)}"] if flags.gpus else []
    job = any_job_of(table, [*gpus, *flags.overrides])
    assert isinstance(job, CommandJob)
    return job


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _gpus(text: str) -> str:
    """Return `launch.gpus` as TOML: a number is a number of GPUs, and 0 is the CPU."""
    if text.isdecimal():
        return f'"auto:{text}"' if int(text) else '"cpu"'
    return gpus_value(text.strip("[]"))


def _name(flags: argparse.Namespace, argv: Sequence[str], values: Mapping[str, str]) -> str:
    """Return the job's name: the given name, or the script and its arguments; then the values of the grid."""
    if flags.name:
        return " ".join([flags.name, *(f"{name}={value}" for name, value in values.items())])[:LONGEST_NAME]
    program, *others = (flags.shell or "").split() or argv
    # An argument may be a program of several lines.
    words = [" ".join(word.split()) for word in (os.path.basename(program), *others)]
    is_runner = words[0].rstrip("0123456789.") in ("python", "sh", "bash") and others[:1] and others[0][:1] != "-"
    return (" ".join([os.path.basename(words[1]), *words[2:]] if is_runner else words).strip() or "command")[
        :LONGEST_NAME
    ]


def _combinations(axes: Sequence[str]) -> list[dict[str, str]]:
    """Return the values of every combination of the grid: `lr=1e-3,3e-4` and `seed=0,1` give four."""
    columns = []
    for axis in axes:
        name, equals, values = axis.partition("=")
        words = [value.strip() for value in values.split(",") if value.strip()]
        if not (equals and name.strip().isidentifier() and words):
            raise UsageError(f'--grid takes a name and values like lr=1e-3,3e-4, not "{axis}"')
        columns.append([(name.strip(), word) for word in words])
    return [dict(combination) for combination in itertools.product(*columns)]


def _fill(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace("{" + name + "}", value)
    return word
