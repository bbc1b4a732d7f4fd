"""Dependencies between queued jobs (`--after`): messages about unfinished jobs, and a check for cycles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from sae_tui.jobs.output import kind_of
from sae_tui.jobs.states import ENDED, describe_state
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control, Unreadable
from trainer.contract.store.rows import Job
from trainer.contract.store.states import DONE, JobState
from trainer.contract.wording import join_words


def comes_after(job_ids: Iterable[int]) -> str:
    """Return a clause like `comes after job 3 and job 4`, or "" if there are no jobs."""
    named = [f"job {job_id}" for job_id in job_ids]
    return f"comes after {join_words(named)}" if named else ""


def waiting_for(jobs: Iterable[Job], deleted: Iterable[int]) -> str:
    """Describe the queued jobs that would wait forever if the jobs in `deleted` were deleted, or return "".

    Example: `job 2 comes after job 1 and would no longer start automatically`.
    """
    jobs, gone = list(jobs), {*deleted}
    unfinished = {job.id for job in jobs if job.id in gone and job.state not in DONE}
    waiting = [job.id for job in jobs if job.state == JobState.QUEUED and not unfinished.isdisjoint(job.after)]
    if not waiting:
        return ""
    before = sorted(unfinished & {other for job in jobs if job.id in waiting for other in job.after})
    which = join_words([f"job {job_id}" for job_id in sorted(waiting)])
    come = "come" if len(waiting) > 1 else "comes"
    after = join_words([f"job {job_id}" for job_id in before])
    return f"{which} {come} after {after} and would no longer start automatically"


def describe_unfinished(data: DataDir, control: Control, job: Job) -> str:
    """Return a clause about a job's first unfinished dependency, or "" if there is none.

    When a finished job is deleted, it is removed from `after`. Therefore, a deleted job that is still in `after` had
    not finished.
    """
    for other in job.after:
        try:
            state = control.state(other)
        except Unreadable as error:
            return f"{comes_after([other])}, but {error}"
        if state is None and data.run(other).root.is_dir():
            # The other job has files but no row, so the store was lost and that job's state is unknown.
            return f"{comes_after([other])}, which is not in the list; `sae-tui repair` restores it"
        if state is None:
            remedy = f"stop waiting for it: `sae-tui after {job.id}`"
            return f"{comes_after([other])}, which was deleted before it had finished; {remedy}"
        if not state.is_final:
            return f"{comes_after([other])}, which is {_word(control, other, state)}"
        if state not in DONE:
            remedy = f"{_rerun(control, other)}, or stop waiting for it: `sae-tui after {job.id}`"
            return f"{comes_after([other])}, which {ENDED[state]}; {remedy}"
    return ""


def _rerun(control: Control, job_id: int) -> str:
    with contextlib.suppress(Unreadable):
        if kind_of(control.job(job_id).config).is_program:
            return f"run job {job_id} again"
    return f"resume job {job_id}"


def _word(control: Control, job_id: int, state: JobState) -> str:
    """Return the displayed word for a job state, or the state's own name if the job's row cannot be read."""
    try:
        return describe_state(control.job(job_id)).word
    except Unreadable:
        return str(state)


def refuse_circle(control: Control, job_id: int, after: Iterable[int]) -> None:
    """Raise `UserError` if a job would depend on itself, directly or through others, or on a missing job."""
    others = [control.job(other).id for other in after]
    if job_id in others:
        raise UserError(f"job {job_id} cannot come after itself; choose another job")
    # A job that was deleted in the meantime is not in this dict, and does not depend on other jobs.
    after_by_job = {job.id: job.after for job in control.jobs()}
    for other in others:
        if chain := _chain(after_by_job, other, job_id):
            which = ", which ".join(comes_after([later]) for later in chain[1:])
            raise UserError(f"job {job_id} cannot come after job {other}: job {other} {which}")


def _chain(after: dict[int, tuple[int, ...]], first: int, last: int) -> list[int]:
    """Return a chain of job ids from `first` to `last`, each depending on the next, or [] if there is no chain."""
    ways = [[first]]
    visited = {first}
    while ways:
        way = ways.pop(0)
        if way[-1] == last:
            return way
        for other in after.get(way[-1], ()):
            if other not in visited:
                visited.add(other)
                ways.append([*way, other])
    return []
