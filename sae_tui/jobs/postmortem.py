"""Why a job failed, put together from what its last attempt left: the rank that failed first, and what to do."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from sae_tui.jobs.causes import remedy
from sae_tui.jobs.ending import Ending, RankEnding, read_ending
from trainer.contract.endings import signal_name
from trainer.contract.paths import DataDir
from trainer.contract.records import Job
from trainer.contract.states import JobState
from trainer.contract.tails import tail

LOG_LINES = 8
TRACEBACK_LINES = 12


class Postmortem(msgspec.Struct, frozen=True):
    """`rank` failed first; its exception and last lines, how the others ended, and what is known to help."""

    error: str
    remedy: str = ""
    rank: int | None = None
    traceback: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    stacks: str = ""


def examine(data: DataDir, job: Job) -> Postmortem | None:
    """None for a job that has not failed; reads a few small files."""
    if job.state not in (JobState.FAILED, JobState.LOST) or not job.error:
        return None
    paths = data.run(job.id)
    known = remedy(job.error)
    ending = read_ending(paths.exit_file)
    rank = ending.first_failed if ending else None
    attempt = paths.attempt(job.attempt)
    stacks = attempt / "stacks.txt"
    return Postmortem(
        error=job.error,
        remedy=known.text if known else "",
        rank=rank,
        traceback=_traceback(paths.rank_exit(job.attempt, rank or 0)),
        log=tuple(line for line in tail(paths.log(rank or 0), LOG_LINES) if line.strip()),
        others=_others(ending, rank) if ending else (),
        stacks=str(stacks) if stacks.exists() else "",
    )


def _traceback(file: Path) -> tuple[str, ...]:
    """The innermost frames and the exception."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        left = msgspec.json.decode(file.read_bytes(), type=dict[str, str | None])
        return tuple((left.get("traceback") or "").rstrip().splitlines()[-TRACEBACK_LINES:])
    return ()


def _others(ending: Ending, first: int | None) -> tuple[str, ...]:
    return tuple(f"rank {rank.rank} {_how(rank)}" for rank in ending.ranks if rank.rank != first)


def _how(rank: RankEnding) -> str:
    if rank.exit_signal:
        return f"was ended ({signal_name(rank.exit_signal)})"
    return rank.error.removeprefix(f"rank {rank.rank}: ") if rank.error else f"ended with {rank.exit_code}"
