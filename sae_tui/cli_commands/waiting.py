"""Waits for jobs to end, and shows their progress."""

from __future__ import annotations

import time

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.jobs import RECONCILE_EVERY_S, json_rows
from sae_tui.cli_commands.output import say, show_json
from sae_tui.jobs.output import kind_of, name_of_output
from sae_tui.jobs.states import ENDED, describe_state
from sae_tui.jobs.view.find import waits
from sae_tui.jobs.view.reader import JobReader, JobView
from trainer.contract.errors import UserError
from trainer.contract.exits import Exit
from trainer.contract.progress import Progress, Reached
from trainer.contract.store.states import JobState

POLL_S = 0.25
# Maps a job's final state to the exit code of a command waiting for the job.
EXITS = {
    JobState.FINISHED: Exit.DONE,
    JobState.STOPPED: Exit.STOPPED,
    JobState.FAILED: Exit.JOB_FAILED,
    JobState.LOST: Exit.JOB_LOST,
    JobState.IMPORTED: Exit.DONE,
}


def wait_for(context: CommandContext, *job_ids: int, began: str = "is launched", leaves: str = "running") -> int:
    """Wait until all jobs have ended and return the worst exit code; Ctrl-C does not affect the jobs."""
    if not context.as_json:
        for job_id in job_ids:
            say(f"job {job_id} {began}; Ctrl-C leaves it {leaves}")
    ended = [wait_until_ended(context, job_id) for job_id in job_ids]
    if context.as_json:
        rows = json_rows(context, ended)
        show_json(rows if len(rows) > 1 else rows[0])
    return max(EXITS[view.state] for view in ended)


def _what_came_of(view: JobView) -> str:
    """Return why a job failed or its output path, or "" if there is neither."""
    if view.error:
        return f": {view.error}"
    return f"; its {name_of_output(view)} in {view.output_path}" if view.output_path else ""


def wait_until_ended(context: CommandContext, job_id: int, *, prints_end: bool = True) -> JobView:
    """Wait until the job has ended, print how it ended if `prints_end`, and return it.

    Raise `UserError` if the job is deleted in the meantime.
    """
    reader = reader_of(context, job_id)
    reconcile_at = time.monotonic() + RECONCILE_EVERY_S
    with Progress(f"job {job_id}", to_descriptor=False) as progress:
        while reader.view and not reader.view.state.is_final:
            progress.reach(_reached(reader.view))
            time.sleep(POLL_S)
            if time.monotonic() >= reconcile_at:
                context.mend()
                reconcile_at = time.monotonic() + RECONCILE_EVERY_S
            reader.poll()
    if reader.view is None:
        raise UserError(f"job {job_id} was deleted during --wait")
    view = reader.view
    reader.close()
    if prints_end and not context.as_json:
        say(f"job {job_id} {ENDED[view.state]}{_what_came_of(view)}")
    return view


def _reached(job: JobView) -> Reached:
    """Return a job's progress: why it is waiting, its phase before the first step, or its step."""
    if job.state == JobState.QUEUED:
        return Reached(f"waits: {waits(job)}")
    if not job.step or not job.total_steps:
        return Reached(job.phase or describe_state(job).word)
    kind = kind_of(job.config)
    rate = f" at {job.tokens_per_s:,.0f} {kind.rate}" if job.tokens_per_s else ""
    return Reached(f"{kind.unit} {job.step:,} of {job.total_steps:,}{rate}", job.progress, job.eta_s)


def reader_of(context: CommandContext, job_id: int) -> JobReader:
    """Return a reader that has polled the job once; raise `UserError` if the job does not exist."""
    reader = JobReader(context.data, job_id, mends=True)
    reader.poll()
    if reader.view is None:
        raise UserError(reader.problem or f"there is no job {job_id}; `sae-tui jobs` lists them")
    return reader
