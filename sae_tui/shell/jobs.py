"""`sae-tui validate | launch | jobs | job | stop | logs`: jobs from the shell; edits.py has the other commands."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from sae_tui.doctor.session import guarantee
from sae_tui.jobs import actions, placement
from sae_tui.jobs.availability import GpuChoice
from sae_tui.jobs.clone import grid, named
from sae_tui.jobs.files import Follower, tail
from sae_tui.jobs.find import find
from sae_tui.jobs.need import Need, Room, need
from sae_tui.jobs.occupancy import reopened_as
from sae_tui.jobs.placement import Placement
from sae_tui.jobs.postmortem import Postmortem, examine
from sae_tui.jobs.reader import JobReader, JobsReader, JobView
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.storage import store_warning
from sae_tui.jobs.words import duration, gigabytes, plural
from sae_tui.shell.context import Context, examine_job, read_job
from sae_tui.shell.output import UNKNOWN, clock_time, say, show_fields, show_json, show_table, warn
from trainer.contract.job import JobConfig
from trainer.contract.problems import JobFileError, Problem, UserError
from trainer.contract.states import JobState

POLL_S = 0.25
RECONCILE_EVERY_S = 2.0
EXIT_CODES = {JobState.FINISHED: 0, JobState.STOPPED: 3, JobState.FAILED: 4, JobState.LOST: 5}


def validate(context: Context, flags: argparse.Namespace) -> int:
    """Every reason why a job would not run, what to be warned of, and its memory; 1 where it would not run."""
    needed = None
    try:
        job, problems = examine_job(flags.job, flags.overrides, flags.gpus)
        if job:
            where, wrong = _check(context, job)
            problems += wrong
            needed = _need(context, job, where)
    except JobFileError as error:
        problems = list(error.problems)
    found = [str(problem) for problem in problems if problem.severity == "error"]
    warnings = [str(problem) for problem in problems if problem.severity == "warning"]
    if context.as_json:
        memory = {"memory_required": needed and needed.rank_bytes, "memory_measured": needed and needed.measured_bytes}
        show_json({"valid": not found, "errors": found, "warnings": warnings} | memory)
    else:
        for kind, messages in (("error", found), ("warning", warnings)):
            for message in messages:
                say(f"{kind}: {message}")
        say(f"{flags.job} {'cannot run here' if found else 'is valid'}")
        if needed:
            say(f"needs {gigabytes(needed.rank_bytes)} per rank" + (f"; {needed.measured}" if needed.measured else ""))
    return 1 if found else 0


def launch(context: Context, flags: argparse.Namespace) -> int:
    """Records the jobs and returns; with `--wait` the exit code tells how the worst of them ended."""
    overrides = _with_queue_flags(flags)
    jobs = [
        read_job(file, [*overrides, *combination], flags.gpus)
        for file in flags.jobs
        for combination in grid(flags.grid)
    ]
    return launch_all(context, flags, [named(job, flags.grid) for job in jobs] if flags.grid else jobs)


def launch_all(
    context: Context, flags: argparse.Namespace, jobs: Sequence[JobConfig], parent: int | None = None
) -> int:
    """Launches all, or none where one of them cannot run."""
    if message := store_warning(context.data):
        warn(f"warning: {message}")
    places = [_checked(context, job) for job in jobs]
    logout = guarantee(context.data)
    if logout.level == "warning":
        warn(f"warning: {logout.sentence}; {logout.remedy}")
    launched = {
        actions.launch(
            context.data,
            job,
            where,
            gpu_source=_source(context),
            after=flags.after,
            hold=flags.hold,
            tags=flags.tag,
            parent=parent,
        ): where
        for job, where in zip(jobs, places, strict=True)
    }
    if flags.wait:
        return wait_for(context, *launched)
    if context.as_json:
        told = [
            {
                "id": job_id,
                "gpus": [index for index, _ in where.gpus],
                "device": where.device,
                "logout": logout.sentence,
            }
            for job_id, where in launched.items()
        ]
        show_json(told if len(told) > 1 else told[0])
        return 0
    for job_id, where in launched.items():
        held = [f"GPU {choice.index}: {choice.reason}" for choice in _busy(context, where)]
        what = f"is queued for {_devices(where)}" + (f" (held: {'; '.join(held)})" if held else "")
        say(f"job {job_id} {what}; `sae-tui job {job_id}` and `sae-tui logs {job_id} -f` follow it")
    return 0


def _checked(context: Context, job: JobConfig) -> Placement:
    """Where the job will run; raises `JobFileError` with everything that keeps it from running."""
    where, problems = _check(context, job)
    for problem in problems:
        if problem.severity == "warning":
            warn(f"warning: {problem}")
    if where is None or any(problem.severity == "error" for problem in problems):
        raise JobFileError(problem for problem in problems if problem.severity == "error")
    return where


def show_jobs(context: Context, flags: argparse.Namespace) -> int:
    """Those that match the words, in the order that is asked for."""
    _reconcile(context)
    reader = JobsReader(context.data)
    reader.poll()
    if reader.problem:
        raise UserError(reader.problem)
    found = find(reader.jobs, " ".join(flags.filter), flags.sort, flags.limit)
    if context.as_json:
        show_json([_fields(job) for job in found])
    elif not reader.jobs:
        say("no jobs yet; `sae-tui launch JOB.toml` starts one")
    elif not found:
        say(f"none of the {len(reader.jobs)} jobs matches")
    else:
        headings = ("ID", "NAME", "STATE", "STEP", "DONE", "LOSS", "FVU", "L0", "TOKENS/S", "LEFT", "ON")
        show_table(headings, [_row(job) for job in found])
    return 0


def show_job(context: Context, flags: argparse.Namespace) -> int:
    """One job with what happened to it."""
    _reconcile(context)
    reader = _reader(context, flags.id)
    assert reader.view is not None
    if context.as_json:
        shown = _fields(reader.view) | {"events": reader.events, "ranks": reader.ranks}
        show_json(shown | {"cause": examine(context.data, reader.view)})
        return 0
    left_out = ("created", "started", "ended")
    values = {name: value for name, value in _fields(reader.view).items() if name not in left_out}
    values["eta_s"] = _left(reader.view)
    show_fields(("left" if name == "eta_s" else name, _worded(name, value)) for name, value in values.items())
    show_fields((name, clock_time(getattr(reader.view, name))) for name in left_out)
    if found := examine(context.data, reader.view):
        _show_cause(found)
    if reader.events:
        say()
        show_table(
            ("TIME", "EVENT", "MESSAGE"),
            [(clock_time(event.timestamp), event.kind, event.message) for event in reader.events],
        )
    return 0


def _show_cause(found: Postmortem) -> None:
    """The first rank that failed, its exception and last lines, and what to do."""
    if found.remedy:
        say(f"\nWhat to do: {found.remedy}")
    for title, lines in (("Exception", found.traceback), (f"Last lines of rank {found.rank or 0}", found.log)):
        if lines:
            say(f"\n{title}:")
            for line in lines:
                say(f"  {line}")
    for other in found.others:
        say(other)


def stop(context: Context, flags: argparse.Namespace) -> int:
    _reconcile(context)
    message = (actions.kill if flags.kill else actions.stop)(context.data, flags.id)
    if context.as_json:
        view = _reader(context, flags.id).view
        show_json({"id": flags.id, "state": view.state if view else None, "message": message})
    else:
        say(message)
    return 0


def show_logs(context: Context, flags: argparse.Namespace) -> int:
    """The last lines a rank has written, and with `-f` what it writes until the job ends."""
    reader = _reader(context, flags.id)
    assert reader.view is not None
    if flags.rank >= reader.view.world_size:
        raise UserError(f"job {flags.id} has no rank {flags.rank}; --rank takes 0 to {reader.view.world_size - 1}")
    path = context.data.run(flags.id).log(flags.rank)
    follower = Follower(path, offset=path.stat().st_size if path.exists() else 0)
    lines = tail(path, flags.lines)
    if context.as_json and not flags.follow:
        show_json({"id": flags.id, "rank": flags.rank, "lines": lines})
        return 0
    for line in lines:
        say(line)
    if not lines and not flags.follow:
        warn(f"rank {flags.rank} of job {flags.id} has written nothing")
    while flags.follow:
        ended = reader.view.state.is_final
        for line in follower.new_lines():
            say(line)
        if ended:
            break
        time.sleep(POLL_S)
        reader.poll()
    return 0


def _check(context: Context, job: JobConfig) -> tuple[Placement | None, list[Problem]]:
    """Where the job would run, and every problem with it and with that."""
    gpus = context.gpus
    problems = actions.validate(job, placement.machine(gpus.choices, context.data))
    try:
        enabled = context.settings.multi_gpu_enabled
        return placement.place(job, gpus.choices, source_cuda=gpus.cuda, multi_gpu_enabled=enabled), problems
    except JobFileError as error:
        # The checks name the same setting in their own words.
        known = {problem.path for problem in problems if problem.severity == "error"}
        return None, [*problems, *(problem for problem in error.problems if problem.path not in known)]


def _need(context: Context, job: JobConfig, where: Placement | None) -> Need | None:
    """What each rank takes; None where the job cannot be placed, or its data not be read."""
    if where is None:
        return None
    try:
        data = job.data_shape()
    except JobFileError:
        return None
    on_gpus = bool(where.gpus)
    return need(job, data, where.world_size, Room(), on_gpus=on_gpus, device=where.device, past=context.past())


def _with_queue_flags(flags: argparse.Namespace) -> list[str]:
    """`--share` and `--priority` are settings of the job."""
    shares = ["launch.share=true"] if flags.share else []
    return [*flags.overrides, *shares, *([] if flags.priority is None else [f"launch.priority={flags.priority}"])]


def _devices(where: Placement) -> str:
    if where.any_gpus:
        return f"any {plural(where.gpus_wanted, 'GPU')}"
    if where.device == "cuda" and not where.gpus:
        return "GPUs that SLURM chooses"
    return f"GPU {', '.join(str(index) for index, _ in where.gpus)}" if where.gpus else "the CPU"


def _source(context: Context) -> str:
    """The name under which a supervisor finds these GPUs again."""
    return reopened_as(context.gpus.source_name, len(context.gpus.choices))


def _busy(context: Context, where: Placement) -> list[GpuChoice]:
    chosen = {index for index, _ in where.gpus}
    return [choice for choice in context.gpus.choices if choice.index in chosen and choice.state == "busy"]


def wait_for(context: Context, *job_ids: int) -> int:
    """Until all have ended, and the exit code of the worst; leaving early (Ctrl-C) leaves them running."""
    if not context.as_json:
        for job_id in job_ids:
            say(f"job {job_id} is launched; Ctrl-C leaves it running")
    ended = [_ended(context, job_id) for job_id in job_ids]
    if context.as_json:
        told = [_fields(view) for view in ended]
        show_json(told if len(told) > 1 else told[0])
    return max(EXIT_CODES[view.state] for view in ended)


def _ended(context: Context, job_id: int) -> JobView:
    """The job once it has ended, which is told."""
    reader = _reader(context, job_id)
    reconcile_at = time.monotonic() + RECONCILE_EVERY_S
    while reader.view and not reader.view.state.is_final:
        time.sleep(POLL_S)
        if time.monotonic() >= reconcile_at:
            _reconcile(context)
            reconcile_at = time.monotonic() + RECONCILE_EVERY_S
        reader.poll()
    assert reader.view is not None
    view = reader.view
    reader.close()
    if not context.as_json:
        say(f"job {job_id} {view.state}" + (f": {view.error}" if view.error else f" {view.output_path or ''}").rstrip())
    return view


def _reader(context: Context, job_id: int) -> JobReader:
    """The job, read once; raises `UserError` where there is no such job."""
    reader = JobReader(context.data, job_id)
    reader.poll()
    if reader.view is None:
        raise UserError(reader.problem or f"there is no job {job_id}; `sae-tui jobs` lists them")
    return reader


def _reconcile(context: Context) -> None:
    """Mends what a crash left, where the store can be written at all."""
    with contextlib.suppress(UserError):
        reconcile(context.data)


def _fields(job: JobView) -> dict[str, Any]:
    names = (
        "id", "name", "state", "phase", "step", "total_steps", "progress", "eta_s", "tokens", "loss", "fvu", "l0",
        "dead_fraction", "tokens_per_s", "device", "gpu_ids", "gpu_uuids", "distributed", "world_size", "mode", "host",
        "user", "attempt",
        "waits_for", "priority", "held", "after", "tags", "note", "created", "started", "ended", "error", "output_path",
        "estimated_memory_bytes", "peak_memory_bytes", "dropped",
    )  # fmt: skip
    return {name: getattr(job, name) for name in names}


def _worded(name: str, value: Any) -> object:
    return gigabytes(value) if name.endswith("_bytes") and value is not None else value


def _row(job: JobView) -> tuple[object, ...]:
    on = ",".join(map(str, job.gpu_ids)) or (f"any {job.gpus_wanted}" if job.any_gpus else "cpu")
    rate = None if job.tokens_per_s is None else round(job.tokens_per_s)
    done = f"{100 * job.progress:.0f}%"
    return (job.id, job.name, job.state, job.step, done, job.loss, job.fvu, job.l0, rate, _left(job), on)


def _left(job: JobView) -> str:
    """`12 min`, from the steps left and the speed of the latest ones."""
    return UNKNOWN if job.eta_s is None else duration(job.eta_s)
