"""`sae-tui validate | launch`, and the launch functions for other job-creating commands."""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Sequence
from typing import Any, NamedTuple

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.job_files import consent_of, examine_job, read_job
from sae_tui.cli_commands.output import say, show_json, warn
from sae_tui.cli_commands.selection import named_jobs
from sae_tui.cli_commands.waiting import wait_for
from sae_tui.doctor.session import guarantee
from sae_tui.jobs import environment
from sae_tui.jobs.gpus.availability import GpuChoice
from sae_tui.jobs.gpus.occupancy import name_elsewhere
from sae_tui.jobs.launch import launching, placement
from sae_tui.jobs.launch.clone import grid, name_by_axes
from sae_tui.jobs.launch.kinds import launch_kind
from sae_tui.jobs.launch.limits import problems_with_policy, warnings_about
from sae_tui.jobs.launch.memory_need import PeakMemory, used_before
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.queue.after import comes_after
from sae_tui.jobs.queue.promised import promised_by
from sae_tui.jobs.upkeep.storage import store_warning
from sae_tui.policy import read_policy
from trainer.contract.errors import JobFileError, Problem, errors
from trainer.contract.exits import Exit
from trainer.contract.extras import lack_of_trainer
from trainer.contract.output import has_done
from trainer.contract.planning.check_job import Proposal, propose
from trainer.contract.planning.outlook import AnyOutlook
from trainer.contract.progress import Progress, track
from trainer.contract.settings.catalog import LAUNCH_BACKENDS
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.promised import NO_PROMISES, Promises
from trainer.contract.wording import join_words, plural, ranges

# For an array of up to this size, a command prints one line per job.
MOST_LISTED = 8


def validate(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print a job's errors, warnings and memory requirement; return 1 if it would not run."""
    look: AnyOutlook | None = None
    measured: PeakMemory | None = None
    job: AnyJob | None = None
    start = ""
    try:
        job, wrong, refusals = examine_job(flags.job, flags.overrides, flags.gpus, consent_of(context, flags))
        # The memory requirement is unknown if defaults have replaced invalid settings.
        is_known = not any(problem.severity == "error" for problem in wrong)
        problems = [*refusals, *wrong]
        if job:
            job = launching.with_whole_python(job, context.settings.python)
            context.wants_gpus = not (job.on_cpu or job.cluster)
            where, wrong = _Checks(context).check(job)
            problems += [problem for problem in wrong if is_known or problem.severity == "error"]
            look = where.look if where and is_known else None
            if where and look:
                measured = launch_kind(job.kind).measured(job, look, where.device, context.past())
            if where and not errors(problems):
                start, wrong = _trial(job, where)
                problems += wrong
    except JobFileError as error:
        problems = list(error.problems)
    wrongs = [str(problem) for problem in errors(problems)]
    warnings = [str(problem) for problem in problems if problem.severity == "warning"]
    if context.as_json:
        memory = {"memory_required": look and look.needs_bytes, "memory_measured": measured and measured.peak_bytes}
        answer = {"valid": not wrongs, "errors": wrongs, "warnings": warnings, "mode": look and look.mode}
        answer |= {"start": start or None}
        show_json(answer | memory | (launch_kind(job.kind).answer(look) if job and look else {}))
    else:
        for kind, messages in (("error", wrongs), ("warning", warnings)):
            for message in messages:
                say(f"{kind}: {message}")
        say(f"{flags.job} {'cannot run here' if wrongs else 'is valid'}")
        if start:
            say(start)
        if job and look:
            say(launch_kind(job.kind).needs(look, measured))
        if job and job.needs_trainer and job.launch.python and not wrongs:
            say(f"trained with {environment.look(job.launch.python).words}")
    return Exit.FAILED if wrongs else Exit.DONE


def _trial(job: AnyJob, where: Placement) -> tuple[str, list[Problem]]:
    """Return when the cluster's scheduler would start a job, and the reasons why it would not."""
    if not (trial := LAUNCH_BACKENDS[job.launch.backend].trial):
        return "", []
    mode = where.look.mode if where.look else ""
    answer = pkgutil.resolve_name(trial)(job, where.world_size, where.device, mode or "")
    return ("", [answer]) if isinstance(answer, Problem) else (answer, [])


def launch(context: CommandContext, flags: argparse.Namespace) -> int:
    """Record the jobs and return; with `--wait`, wait for all jobs and return the worst exit code."""
    overrides, consent = _with_queue_flags(flags), consent_of(context, flags)
    combinations = grid(flags.grid)
    with Progress("launch", to_descriptor=False):
        jobs = [
            read_job(file, [*overrides, *combination], flags.gpus, consent)
            for file in flags.jobs
            for combination in track(combinations, "job files")
        ]
    jobs = [name_by_axes(job, flags.grid) for job in jobs] if flags.grid else jobs
    return launch_all(context, flags, jobs, array=array_of(flags, len(jobs)))


class Array(NamedTuple):
    """The number of an array's jobs that may run at once; None means no limit."""

    at_once: int | None = None


def array_of(flags: argparse.Namespace, n_jobs: int) -> Array | None:
    """Return the array that the jobs form, or None; raise `JobFileError` for a limit on a single job."""
    if flags.at_once and n_jobs < 2:
        raise JobFileError([Problem("--at-once", "limits several jobs, but there is only one; add --grid")])
    return Array(flags.at_once) if flags.grid or flags.at_once else None


def launch_all(
    context: CommandContext,
    flags: argparse.Namespace,
    jobs: Sequence[AnyJob],
    parent: int | None = None,
    array: Array | None = None,
) -> int:
    """Launch all jobs, or none if any cannot run. Return the exit code."""
    ids, places = record_all(context, flags, jobs, parent, array)
    if flags.wait:
        held = {"began": "is launched and held", "leaves": "queued"} if flags.hold else {}
        return wait_for(context, *ids, **held)
    if context.as_json:
        shared = {"logout": guarantee(context.data).sentence, "array": ids[0] if array else None}
        rows = [_launched(job_id, where) | shared for job_id, where in zip(ids, places, strict=True)]
        show_json(rows if len(rows) > 1 else rows[0])
    elif array and len(ids) > MOST_LISTED:
        say(_array_stands(flags, ids, array))
    else:
        for job_id, job, where in zip(ids, jobs, places, strict=True):
            say(f"job {job_id} {_stands(context, flags, job_id, job, where)}")
    return Exit.DONE


def record_all(
    context: CommandContext,
    flags: argparse.Namespace,
    jobs: Sequence[AnyJob],
    parent: int | None = None,
    array: Array | None = None,
) -> tuple[list[int], list[Placement]]:
    """Launch all jobs, or none if any cannot run. Return their ids and where they run."""
    # A clone trains with its parent's Python, even if that was the app's own Python.
    jobs = [launching.with_whole_python(job, context.settings.python if parent is None else "") for job in jobs]
    context.wants_gpus = not all(job.on_cpu or job.cluster for job in jobs)
    if message := store_warning(context.data):
        warn(f"warning: {message}")
    places = _check_all(context, jobs, promised_by(context.data, flags.after))
    logout = guarantee(context.data)
    if logout.level == "warning":
        warn(f"warning: {logout.sentence}; {logout.remedy}")
    options = {"after": flags.after, "hold": flags.hold, "tags": flags.tag, "parent": parent}
    options |= {"as_array": array is not None, "at_once": array and array.at_once}
    with Progress("launch", to_descriptor=False):
        pairs = zip(jobs, places, strict=True)
        try:
            ids = launching.launch_all(context.data, pairs, gpu_source=_source(context), **options)
        except launching.NotStarted as error:
            warn(f"warning: {error}")
            ids = error.job_ids
    has_done(f"{named_jobs(ids)} {'are' if len(ids) > 1 else 'is'} launched")
    return ids, places


def _launched(job_id: int, where: Placement) -> dict[str, Any]:
    return {"id": job_id, "gpus": [index for index, _ in where.gpus], "device": where.device}


def _array_stands(flags: argparse.Namespace, ids: Sequence[int], array: Array) -> str:
    """Return a message about a newly launched array's state and how to follow it."""
    limit = f", at most {array.at_once} of them at once" if array.at_once else ""
    others = comes_after(dict.fromkeys(flags.after))
    after = f" and {others.replace('comes', 'come', 1)}" if others else ""
    which = f"array {ids[0]}: {plural(len(ids), 'job')} ({ranges(ids)})"
    if flags.hold:
        return f"{which} are held{after}{limit}; `sae-tui release {_as_range(ids)}` lets them start"
    return f"{which} are queued{after}{limit}; `sae-tui jobs` shows their progress"


def _as_range(ids: Sequence[int]) -> str:
    return ranges(ids).replace(",", "")


def _stands(context: CommandContext, flags: argparse.Namespace, job_id: int, job: AnyJob, where: Placement) -> str:
    """Return a message about a newly launched job's state and how to follow the job."""
    follow = f"`sae-tui job {job_id}` and `sae-tui logs {job_id} -f` follow it"
    queued = f"is queued for {_devices(where, job)}"
    others = comes_after(dict.fromkeys(flags.after))
    if flags.hold:
        return f"is held{f' and {others}' if others else ''}; `sae-tui release {job_id}` lets it start"
    if others:
        return f"{queued} and {others}; {follow}"
    taken = [] if job.launch.share else _busy(context, where)
    users = [f"GPU {one.index} {'is' if one.job_id is None else 'is in use by'} {one.reason}" for one in taken]
    return f"waits: {join_words(users)}; {follow}" if users else f"{queued}; {follow}"


def _check_all(context: CommandContext, jobs: Sequence[AnyJob], promises: Promises) -> list[Placement]:
    """Return the jobs' placements and print warnings; raise `JobFileError` with all errors in the first invalid job."""
    checks, places, warnings = _Checks(context, promises), [], dict[str, None]()
    try:
        with Progress("check", to_descriptor=False):
            for job in track(jobs, "jobs"):
                where, problems = checks.check(job)
                warnings |= {str(problem): None for problem in problems if problem.severity == "warning"}
                wrong = errors(problems)
                if where is None or wrong:
                    raise JobFileError(wrong)
                places.append(where)
    finally:
        for warning in warnings:
            warn(f"warning: {warning}")
    return places


def resolve_placement(context: CommandContext, job: AnyJob) -> Placement:
    """Return the job's placement; raise `JobFileError` if the job can never run."""
    with environment.judged_there(job):
        checks = _Checks(context)
        return checks.place(checks.propose(job))


class _Checks:
    """Checks jobs against this machine. It reads the data about the machine and past jobs only once."""

    def __init__(self, context: CommandContext, promises: Promises = NO_PROMISES) -> None:
        self._context = context
        gpus = context.gpus
        self._machine = placement.machine(gpus.choices, context.data, cuda=gpus.cuda, promises=promises)
        self._past, self._policy = context.past(), read_policy(context.data)
        self._used_before = used_before(self._past)

    def check(self, job: AnyJob) -> tuple[Placement | None, list[Problem]]:
        """Return the job's placement, or None, and all problems with the job and its placement."""
        gpus = self._context.gpus
        wants_gpus = gpus.cuda and bool(gpus.choices) and not (job.on_cpu or job.cluster)
        with environment.judged_there(job, wants_gpus=wants_gpus) as problems:
            proposal = self.propose(job)
            lack = lack_of_trainer() if job.needs_trainer else ""
            problems = [*([Problem("", lack)] if lack else []), *problems, *proposal.problems()]
            try:
                where = self.place(proposal)
                beyond = problems_with_policy(job, where.gpus_wanted, self._policy, self._past)
                return where, [*problems, *warnings_about(self._policy), *beyond]
            except JobFileError as error:
                # Skip settings already reported by earlier checks.
                paths = {problem.path for problem in problems if problem.severity == "error"}
                return None, [*problems, *(problem for problem in error.problems if problem.path not in paths)]

    def propose(self, job: AnyJob) -> Proposal[AnyJob]:
        return propose(job, self._machine, self._used_before)

    def place(self, proposal: Proposal[AnyJob]) -> Placement:
        context = self._context
        return placement.place(proposal, context.gpus.choices, multi_gpu_enabled=context.settings.multi_gpu_enabled)


def _with_queue_flags(flags: argparse.Namespace) -> list[str]:
    """Return the overrides, including `--share` and `--priority` as job settings."""
    shares = ["launch.share=true"] if flags.share else []
    return [*flags.overrides, *shares, *([] if flags.priority is None else [f"launch.priority={flags.priority}"])]


def _devices(where: Placement, job: AnyJob) -> str:
    if where.any_gpus:
        return f"any {plural(where.gpus_wanted, 'GPU')}"
    if where.device == "cuda" and not where.gpus:
        return f"GPUs that {job.cluster} chooses"
    return f"GPU {', '.join(str(index) for index, _ in where.gpus)}" if where.gpus else "the CPU"


def _source(context: CommandContext) -> str:
    """Return the name that a supervisor uses to open a GPU source with the same GPUs."""
    return name_elsewhere(context.gpus.source_name, len(context.gpus.choices))


def _busy(context: CommandContext, where: Placement) -> list[GpuChoice]:
    chosen = {index for index, _ in where.gpus}
    return [choice for choice in context.gpus.choices if choice.index in chosen and choice.state == "busy"]
