"""`sae-tui run`: launches any program as a job."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.launching import Array, array_of, launch_all
from sae_tui.cli_commands.output import say, show_json
from sae_tui.cli_commands.values import MOST_IN_ARRAY, ArraySpec
from sae_tui.gpu.secrets import masked_arguments
from sae_tui.jobs.edits import LONGEST_NAME
from sae_tui.jobs.launch import adopt as adopting
from sae_tui.jobs.launch.command_job import command_job
from sae_tui.jobs.launch.kinds.command import ARRAY_INDEX
from trainer.contract.errors import JobFileError, Problem, UsageError
from trainer.contract.exits import Exit
from trainer.contract.progress import Progress, track
from trainer.contract.settings.command import CommandJob, name_of

# The placeholder for the index of a job in an array.
INDEX = "array_index"


def run(context: CommandContext, flags: argparse.Namespace) -> int:
    """Record a command, or one command for each combination of `--grid` and `--array`, and return."""
    argv = _argv(flags)
    combinations = _combinations(flags.grid, flags.array)
    array = _array_of(flags, len(combinations))
    with Progress("run", to_descriptor=False):
        jobs = [_job(flags, argv, values) for values in track(combinations, "jobs")]
    return launch_all(context, flags, jobs, array=array)


def _array_of(flags: argparse.Namespace, n_jobs: int) -> Array | None:
    """Return the array that the jobs form, with the limit of `--at-once` or of `--array 0-31%4`."""
    if flags.array is None:
        return array_of(flags, n_jobs)
    if flags.at_once and flags.array.at_once:
        raise JobFileError([Problem("--at-once", "is also given by --array; leave out one of them")])
    return Array(flags.at_once or flags.array.at_once)


def adopt(context: CommandContext, flags: argparse.Namespace) -> int:
    """Turn a running process of this user into a job."""
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
    """Return the environment variables of the job file, with the index of a job of an array."""
    index = [f"{ARRAY_INDEX}={values[INDEX]}"] if INDEX in values else []
    return [*(_fill(entry, values) for entry in flags.env), *index]


def _name(flags: argparse.Namespace, argv: Sequence[str], values: Mapping[str, str]) -> str:
    """Return the job's name: the given name and the values of the grid, or the command; then the index."""
    axes = [f"{name}={value}" for name, value in values.items() if name != INDEX]
    stem = " ".join([flags.name, *axes]) if flags.name else _name_of_command(flags, argv)
    shows_index = not flags.name and "{" + INDEX + "}" in (flags.shell or " ".join(flags.argv))
    index = f" [{values[INDEX]}]" if flags.array and not shows_index else ""
    return stem[: LONGEST_NAME - len(index)] + index


def _name_of_command(flags: argparse.Namespace, argv: Sequence[str]) -> str:
    # A shell's line is its last argument.
    return name_of(masked_arguments(argv[-1].split() if flags.shell else argv))


def _combinations(axes: Sequence[str], array: ArraySpec | None) -> list[dict[str, str]]:
    """Return the values of every combination: `lr=1e-3,3e-4` and `seed=0,1` give four, and each index of an array all.

    Without `--array`, the jobs of a grid are numbered from 0.
    """
    columns = [_axis(axis) for axis in axes]
    if array:
        columns.append([(INDEX, str(index)) for index in array.indices])
    if (count := math.prod(map(len, columns))) > MOST_IN_ARRAY:
        raise JobFileError([Problem("--grid", f"gives {count:,} jobs, but at most {MOST_IN_ARRAY:,} are possible")])
    combinations = [dict(combination) for combination in itertools.product(*columns)]
    if axes and not array:
        combinations = [{**values, INDEX: str(place)} for place, values in enumerate(combinations)]
    return combinations


def _axis(axis: str) -> list[tuple[str, str]]:
    """Return the values of `lr=1e-3,3e-4`, each with its name."""
    name, equals, values = axis.partition("=")
    name, words = name.strip(), [value.strip() for value in values.split(",") if value.strip()]
    if not (equals and name.isidentifier() and words):
        raise UsageError(f'--grid takes a name and values like lr=1e-3,3e-4, not "{axis}"')
    if name == INDEX:
        raise JobFileError([Problem("--grid", f"{INDEX} is the index of a job; choose another name, or use --array")])
    return [(name, word) for word in words]


def _fill(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace("{" + name + "}", value)
    return word
