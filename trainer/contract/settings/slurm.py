"""Checks the `launch.*` settings of jobs that run under SLURM."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

from trainer.contract.errors import Problem
from trainer.contract.settings.declare import show
from trainer.contract.settings.job import AnyJob

# Maps each sbatch option that users must not set to a phrase saying what already sets it.
_OWN = {
    # squeue and scancel would ask another cluster about the job.
    "--clusters": "this host's SLURM configuration",
    "--array": "launching several jobs with --grid or --array",
    "--nodes": "launch.nodes",
    "--ntasks": "launch.nodes and launch.gpus",
    "--ntasks-per-node": "launch.gpus",
    "--gpus-per-task": "launch.gpus",
    "--gpu-bind": "launch.gpus",
    "--partition": "launch.partition",
    "--account": "launch.account",
    "--time": "launch.time_limit",
    "--output": "the run's own logs",
    "--error": "the run's own logs",
    "--signal": "the run itself, to save before the time limit",
    "--requeue": "launch.max_requeues",
    "--job-name": "name",
    "--chdir": "the launcher",
    "--open-mode": "the run's own logs",
    "--parsable": "the launcher",
    "--wrap": "the launcher",
    "--wait": "`sae-tui launch --wait`",
}
# Complete options that are prefixes of an option above; sbatch interprets any other prefix as an abbreviation.
_WHOLE = {"--gpus"}
_WORD = re.compile(r"[\w.][\w.,:@+-]*")
_OPTION = re.compile(r"--[a-z][\w-]*(=[^\x00-\x1f\x7f]+)?")


def check_slurm(job: AnyJob) -> list[Problem]:
    """Return all of a job's problems that can be detected without contacting SLURM."""
    return [*_check_place(job), *_check_words(job), *_check_options(job)]


def _check_place(job: AnyJob) -> Iterator[Problem]:
    if shutil.which("sbatch") is None:
        message = '"slurm" requires sbatch, which is not on $PATH here; load SLURM\'s module, or use "local"'
        yield Problem("launch.backend", message)
    if isinstance(job.launch.gpus, list):
        n = len(job.launch.gpus)
        message = f'SLURM chooses the GPUs, so the list is treated as "auto:{n}", with {n} for each node'
        yield Problem("launch.gpus", message, "warning")


def _check_words(job: AnyJob) -> Iterator[Problem]:
    for name in ("partition", "account"):
        word = getattr(job.launch, name)
        if word is not None and not _WORD.fullmatch(word):
            yield Problem(f"launch.{name}", f"must be a SLURM name, not {show(word)}")


def _check_options(job: AnyJob) -> Iterator[Problem]:
    for option in job.launch.sbatch_options or ():
        if not _OPTION.fullmatch(option):
            message = f'must look like "--qos=high": on one line, with the value after "=", not {show(option)}'
            yield Problem("launch.sbatch_options", message)
        elif problem := _conflict_of(option.partition("=")[0]):
            yield Problem("launch.sbatch_options", problem)


def _conflict_of(name: str) -> str | None:
    """Return a message if this sbatch option, or the one that it abbreviates, is already set; otherwise None."""
    if owner := _OWN.get(name):
        return f"{name} is set by {owner}; leave it out here"
    whole = next((own for own in _OWN if own.startswith(name) and name not in _WHOLE), None)
    return whole and f"{name} is short for {whole}, which is set by {_OWN[whole]}; leave it out here"
