"""`sae-tui run`: launches any program as a job."""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Mapping, Sequence

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.launching import Array, array_of, launch_all
from sae_tui.cli_commands.output import say, show_json
from sae_tui.cli_commands.selection import bad_usage
from sae_tui.cli_commands.values import MOST_IN_ARRAY, ArraySpec
from sae_tui.jobs.edits import LONGEST_NAME
from sae_tui.jobs.launch import adopt as adopting
from sae_tui.jobs.launch.command_job import command_job, named_as_arguments
from sae_tui.jobs.launch.kinds.command import ARRAY_INDEX, name_of_command
from trainer.contract.errors import JobFileError, Problem
from trainer.contract.exits import Exit
from trainer.contract.progress import Progress, track
from trainer.contract.settings.command import PLACEHOLDERS, CommandJob

# The placeholder for the index of a job in an array.
INDEX = "array_index"


def run(context: CommandContext, flags: argparse.Namespace) -> int:
    """Record a command, or one command for each combination of `--grid` and `--array`, and return."""
    argv = _argv(flags)
    combinations = _combinations(flags.grid, flags.array)
    _refuse_unused(combinations[0], [*argv, *flags.env])
    array = _array_of(flags, len(combinations))
    with named_as_arguments("--", overrides=flags.overrides), Progress("run", to_descriptor=False):
        jobs = [_job(flags, argv, values) for values in track(combinations, "jobs")]
    # The command line itself is correct even if this machine lacks what it asks for, so this is not a usage error.
    with named_as_arguments("--", overrides=flags.overrides, is_usage=False):
        return launch_all(context, flags, jobs, array=array)


def _array_of(flags: argparse.Namespace, n_jobs: int) -> Array | None:
    """Return the array that the jobs form, with the limit from `--at-once` or `--array 0-31%4`."""
    if flags.array is None:
        return array_of(flags, n_jobs)
    if flags.at_once and flags.array.at_once:
        raise JobFileError([Problem("--at-once", "is also given by --array; leave out one of them")])
    return Array(flags.at_once or flags.array.at_once)


def adopt(context: CommandContext, flags: argparse.Namespace) -> int:
    """Turn one of this user's running processes into a job."""
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
        raise JobFileError([Problem("--shell", "is given in addition to a command after --; give only one of them")])
    if not (argv or flags.shell):
        raise bad_usage("COMMAND is missing", "write it after --, as in `sae-tui run --gpus 1 -- python train.py`")
    return ["/bin/sh", "-c", flags.shell] if flags.shell else argv


def _job(flags: argparse.Namespace, argv: Sequence[str], values: Mapping[str, str]) -> CommandJob:
    words = [_fill(word, values) for word in argv]
    return command_job(
        words,
        gpus=flags.gpus,
        memory=flags.memory,
        name=_name(flags, words, values),
        time=flags.time,
        env=_env(flags, values),
        folder=flags.folder,
        clean_env=flags.clean_env,
        stop_signal=flags.stop_signal,
        grace=flags.grace,
        retries=flags.retries,
        retry_on=flags.retry_on,
        requeue=flags.requeue,
        backend=flags.backend,
        priority=flags.priority,
        share=flags.share,
        metrics=flags.metrics,
        settings=flags.overrides,
    )


def _env(flags: argparse.Namespace, values: Mapping[str, str]) -> list[str]:
    """Return the environment variables for the job file, including the array index if there is one."""
    index = [f"{ARRAY_INDEX}={values[INDEX]}"] if INDEX in values else []
    return [*(_fill(entry, values) for entry in flags.env), *index]


def _name(flags: argparse.Namespace, argv: Sequence[str], values: Mapping[str, str]) -> str:
    """Return the job's name: the given name and the grid values, or the command; then the array index."""
    axes = "".join(f" {name}={value}" for name, value in values.items() if name != INDEX)
    stem = flags.name or _name_of_command(flags, argv)
    # A name taken from the command already shows the values, unless it was truncated.
    is_whole = not flags.name and len(stem) < LONGEST_NAME
    shows_index = is_whole and "{" + INDEX + "}" in (flags.shell or " ".join(flags.argv))
    index = f" [{values[INDEX]}]" if flags.array and not shows_index else ""
    # All jobs in a grid share a name prefix, so truncate the prefix rather than the values.
    end = ("" if is_whole else axes)[: LONGEST_NAME - len(index) - 1] + index
    return stem[: LONGEST_NAME - len(end)] + end


def _name_of_command(flags: argparse.Namespace, argv: Sequence[str]) -> str:
    # The shell's last argument is the line that it runs.
    return name_of_command(argv[-1].split() if flags.shell else argv)


def _combinations(axes: Sequence[str], array: ArraySpec | None) -> list[dict[str, str]]:
    """Return each combination's values: `lr=1e-3,3e-4` and `seed=0,1` make four, repeated for each index in `array`.

    Without `array`, the jobs in a grid are numbered from 0.
    """
    columns = dict(map(_axis, axes))
    if len(columns) < len(axes):
        raise _wrong_grid("names a variable twice; write all its values in one --grid, like lr=1e-3,3e-4")
    if array:
        columns[INDEX] = [str(index) for index in array.indices]
    if (count := math.prod(map(len, columns.values()))) > MOST_IN_ARRAY:
        raise _wrong_grid(f"gives {count:,} jobs, but at most {MOST_IN_ARRAY:,} are possible")
    combinations = [dict(zip(columns, values, strict=True)) for values in itertools.product(*columns.values())]
    if axes and not array:
        combinations = [{**values, INDEX: str(place)} for place, values in enumerate(combinations)]
    return combinations


def _axis(axis: str) -> tuple[str, list[str]]:
    """Return the name and the values in text like `lr=1e-3,3e-4`."""
    name, equals, values = axis.partition("=")
    name, words = name.strip(), [value.strip() for value in values.split(",") if value.strip()]
    if not (equals and name.isidentifier() and words):
        raise _wrong_grid(f'must be a name and values like lr=1e-3,3e-4, not "{axis}"')
    if name == INDEX:
        raise _wrong_grid(f"{INDEX} is the index of a job; choose another name, or use --array")
    if name in PLACEHOLDERS:
        raise _wrong_grid(f"{{{name}}} has another meaning; choose another name")
    return name, words


def _refuse_unused(values: Mapping[str, str], words: Sequence[str]) -> None:
    """Raise `JobFileError` if a grid name is not used anywhere, because all its values would produce the same job."""
    unused = [name for name in values if name != INDEX and not any("{" + name + "}" in word for word in words)]
    if unused:
        raise _wrong_grid(f"{unused[0]} is not used; write {{{unused[0]}}} in the command or in --env")


def _wrong_grid(problem: str) -> JobFileError:
    return JobFileError([Problem("--grid", problem)])


def _fill(word: str, values: Mapping[str, str]) -> str:
    """Replace each `{name}` in a word with its value; names inside a value are not replaced."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), word)
