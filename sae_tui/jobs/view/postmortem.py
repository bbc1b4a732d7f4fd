"""Explains why a job failed, based on the files from its last attempt, and adds a remedy if the cause is known."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sae_tui.jobs.ending import JobEnding, RankEnding, read_ending
from sae_tui.jobs.known_failures import Remedy, remedy
from sae_tui.jobs.output import NO_SHARD, extracts, kind_of, rows_stored
from trainer.contract.errors import UserError
from trainer.contract.json_file import read_json
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.runs.checkpoint_manifest import newest_first, read_state
from trainer.contract.runs.log_tail import tail
from trainer.contract.runs.rank_exit import signal_name
from trainer.contract.store.rows import Event, Job
from trainer.contract.store.states import JobState

LOG_LINES = 8
TRACEBACK_LINES = 12
# Matches our own exceptions at the end of a traceback. Their messages are sufficient without the traceback.
_FOR_USERS = re.compile(r"^trainer\.contract\.[\w.]+: ", re.MULTILINE)
_LAST_LINE = "; its last log line: "


class Postmortem(msgspec.Struct, frozen=True):
    """The cause of a job's failure, with a remedy.

    `rank` is the rank that failed first; `traceback` and `log` are from this rank. `others` describes how the other
    ranks ended. `resumes` says what resuming the job does, like `resumes it from step 501`, or is "" if resuming
    does not help.
    """

    error: str
    remedy: str = ""
    rank: int | None = None
    traceback: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    stacks: str = ""
    resumes: str = ""


def examine(data: DataDir, job: Job) -> Postmortem | None:
    """Return why a job failed or was lost, or None if it did neither; this reads only a few small files."""
    if job.state not in (JobState.FAILED, JobState.LOST) or not job.error:
        return None
    paths = data.run(job.id)
    known_cause = remedy_of(job)
    ending = read_ending(paths.exit_file)
    rank = ending.first_failed if ending else None
    attempt = paths.attempt(job.attempt)
    stacks = attempt / "stacks.txt"
    log = [line for line in tail(paths.log(rank or 0), LOG_LINES) if line.strip()]
    error = _drop_log_line(job.error, log)
    return Postmortem(
        error=error,
        remedy=known_cause.text if known_cause else "",
        rank=rank,
        traceback=_traceback(paths.rank_exit(job.attempt, rank or 0), error),
        log=tuple(line for line in log if line not in error.removeprefix(f"rank {rank}: ").splitlines()),
        others=_others(ending, rank) if ending else (),
        stacks=str(stacks) if stacks.exists() else "",
        resumes=_resumes(data, job, known_cause),
    )


def remedy_of(job: Job) -> Remedy | None:
    """Return the remedy for a job's failure, or None if none is known.

    A job that runs a program never has one, because remedies name settings that programs lack.
    """
    return None if kind_of(job.config).is_program else remedy(job.error)


def without_repeats(events: Iterable[Event], error: str | None) -> list[Event]:
    """Return the events to show below the error, without the error's text; merge consecutive repeats into one event."""
    shorter = [_shorten(event, error) if error else event for event in events]
    runs = [list(same) for _, same in itertools.groupby(shorter, key=lambda event: event.message)]
    return [
        msgspec.structs.replace(same[-1], message=f"{same[-1].message} ({len(same)} times)")
        if len(same) > 1
        else same[0]
        for same in runs
    ]


def _shorten(event: Event, error: str) -> Event:
    whole = event.message == error
    message = event.kind.replace("-", " ") if whole else event.message.replace(f": {error};", ": the error above;")
    return msgspec.structs.replace(event, message=message)


def _drop_log_line(error: str, log: list[str]) -> str:
    """Remove the quoted last log line from the error if the displayed log contains that line."""
    cause, _, line = error.partition(_LAST_LINE)
    return cause if line and line in log else error


def _traceback(file: Path, error: str) -> tuple[str, ...]:
    """Return the innermost frames in a rank's traceback and the exception, or () if the error message is sufficient.

    Omit the exception if the error message already contains it.
    """
    left = read_json(file, dict[str, str | None]) or {}
    text = (left.get("traceback") or "").rstrip()
    lines = [] if _FOR_USERS.search(text) else text.splitlines()[-TRACEBACK_LINES:]
    return tuple(lines[:-1] if lines and lines[-1] in error else lines)


def _resumes(data: DataDir, job: Job, known_cause: Remedy | None) -> str:
    """Describe where a resumed job would continue; return "" if the job would fail again."""
    helps, paths = known_cause.may_repeat if known_cause else job.state == JobState.LOST, data.run(job.id)
    if kind_of(job.config).is_program:
        return "runs it again from the start"
    if not helps or not paths.job_file.exists():
        return ""
    if extracts(job.config):
        n_rows = rows_stored(job)
        return (
            f"resumes it after the {n_rows:,} rows of its complete shards" if n_rows else f"starts it again: {NO_SHARD}"
        )
    step = _saved_step(paths)
    if step is None:
        return ""
    return f"resumes it from step {step:,}" if step else "starts it again, because it has not saved a checkpoint"


def _saved_step(paths: RunPaths) -> int | None:
    """Return the step of the latest checkpoint, 0 if there is no checkpoint, or None if it cannot be read."""
    with contextlib.suppress(UserError):
        saved = newest_first(paths.checkpoints)
        return read_state(saved[0]).position.step if saved else 0
    return None


def _others(ending: JobEnding, first: int | None) -> tuple[str, ...]:
    return tuple(f"rank {rank.rank} {_how(rank)}" for rank in ending.ranks if rank.rank != first)


def _how(rank: RankEnding) -> str:
    if rank.exit_signal:
        return f"was ended ({signal_name(rank.exit_signal)})"
    return rank.error.removeprefix(f"rank {rank.rank}: ") if rank.error else f"ended with {rank.exit_code}"
