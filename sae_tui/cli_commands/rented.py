"""`sae-tui task` prints a SkyPilot task for a job; `sae-tui down` ends a job's rented machine."""

from __future__ import annotations

import argparse
import contextlib
import json

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.job_files import consent_of, read_job
from sae_tui.cli_commands.output import say, show_json, warn
from sae_tui.cli_commands.selection import confirm, refuse_without_terminal
from sae_tui.jobs.launchers.skypilot import read_rented
from sae_tui.jobs.skypilot.client import END_S, cost_of, sky
from sae_tui.jobs.skypilot.task import machine_name, make_task, own_version, unreleased_from
from trainer.contract.errors import JobFileError, Problem, UserError, errors
from trainer.contract.exits import Exit
from trainer.contract.output import show_text
from trainer.contract.settings.skypilot import check_rented
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job

# The flags of `task` that set a setting of the same kind.
_FLAGS = {"launch.gpu_kinds": "--gpus", "launch.runs_url": "--runs", "launch.infra": "--infra"}


def task(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print a SkyPilot task file; raise `JobFileError` if the job cannot run on a rented machine."""
    job = read_job(flags.job, _overrides(flags), consent=consent_of(context, flags))
    problems = check_rented(job)
    if wrong := errors(problems):
        raise JobFileError([_by_flag(problem, flags) for problem in wrong])
    made = make_task(job, machine_name(flags.job, job.name))
    for problem in problems:
        warn(f"warning: {problem}")
    if (origin := unreleased_from()) and not job.launch.package and job.needs_trainer:
        wheel = f"build a wheel with `pip wheel --no-deps {origin}`, and name it with --package"
        warn(f"warning: this sae-tui was installed from {origin}; if PyPI has no version {own_version()}, {wheel}")
    if context.as_json:
        gpus = [f"{one.kind}:{one.per_machine}" for one in made.gpus]
        show_json({"name": machine_name(flags.job, job.name), "gpus": gpus, "task": made.text})
    else:
        show_text(made.text)
    return Exit.DONE


def _overrides(flags: argparse.Namespace) -> list[str]:
    """Return the flags as `--set` overrides."""
    found = [*flags.overrides, 'launch.backend="skypilot"']
    if flags.gpus:
        is_count = flags.gpus.partition(":")[0] in ("auto", "cpu")
        kinds = [word.strip() for word in flags.gpus.split(",")]
        found.append(f"launch.gpus={json.dumps(flags.gpus)}" if is_count else f"launch.gpu_kinds={json.dumps(kinds)}")
    given = {"nodes": flags.nodes, "spot": flags.spot, "infra": flags.infra}
    given |= {"runs_url": flags.runs, "package": flags.package}
    return [*found, *(f"launch.{name}={json.dumps(value)}" for name, value in given.items() if value is not None)]


def _by_flag(problem: Problem, flags: argparse.Namespace) -> Problem:
    """Return the problem with the name of the flag that set it, if one did."""
    flag = _FLAGS.get(problem.path, "")
    is_given = flag and getattr(flags, flag.removeprefix("--"))
    return Problem(flag, problem.message) if is_given else problem


def down(context: CommandContext, flags: argparse.Namespace) -> int:
    """End a job's rented machine, after a question that says what would be lost; return 1 if SkyPilot refuses."""
    with contextlib.closing(Control(context.data.control_db, readonly=True)) as control:
        job = control.job(flags.id)
    paths = context.data.run(job.id)
    rented = read_rented(paths.attempt(job.attempt)) if job.attempt else None
    if rented is None:
        raise UserError(f'job {job.id} has no rented machine; it runs with launch.backend = "{job.backend}"')
    if not flags.yes:
        refuse_without_terminal("down")
    cost = cost_of(rented.name)
    if not flags.yes:
        confirm(f"End the machine {rented.name}? {_lost(job)} Cost: {cost}.", "the machine keeps running; add --yes")
    answer = sky(["down", "--yes", rented.name], END_S).wait()
    if answer.failure and "is gone" not in answer.failure:
        raise UserError(f"{rented.name} was not ended: {answer.failure}")
    was_gone = bool(answer.failure)
    if context.as_json:
        show_json({"name": rented.name, "was_gone": was_gone, "cost": cost})
    else:
        say(f"{rented.name} {'was already gone' if was_gone else 'has ended'}; cost: {cost}")
    return Exit.DONE


def _lost(job: Job) -> str:
    """Return a sentence about the files that would be lost."""
    if not job.state.is_final:
        return f"Job {job.id} still uses it, and loses all steps that are stored nowhere else; stop the job first."
    if job.output_path:
        return f"The files of job {job.id} are here, in {job.output_path}."
    return f"Job {job.id} is {job.state}; files that were not copied from the machine are lost."
