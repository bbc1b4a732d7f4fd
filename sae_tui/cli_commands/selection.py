"""Selects the jobs that a command acts on: by id, by a range of ids like `3-9`, or by tag like `#sweep`.

A command that changes several jobs reports on each of them. It skips jobs to which the change does not apply.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence

import msgspec

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import say, show_json, warn
from sae_tui.cli_commands.values import Selector
from sae_tui.jobs.bulk import Change, ChangeOutcome, NothingToDo, change_all, summary
from sae_tui.jobs.store_access import existing
from trainer.contract.errors import BadUsage, UserError
from trainer.contract.exits import Exit
from trainer.contract.output import has_done
from trainer.contract.paths import DataDir
from trainer.contract.progress import Progress, track
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.wording import join_words, ranges

# With this many jobs or more, print a summary after the per-job lines; with fewer, a sentence names each job.
MANY = 6


class Selection(msgspec.Struct, frozen=True):
    """The selected jobs, in the order of the arguments, and which of them were selected by their id."""

    ids: tuple[int, ...]
    named: frozenset[int]
    # Whether the only argument is an id. The command then behaves as if it accepted only one job.
    is_single: bool
    jobs: dict[int, Job]


def select(context: CommandContext, selectors: Sequence[Selector]) -> Selection:
    """Return the selected jobs; raise `UserError` if an id, a range or a tag matches no job."""
    jobs, others = _all_jobs(context.data)
    ids: dict[int, None] = {}
    lacking: list[str] = []
    for one in dict.fromkeys(selectors):
        found = [job.id for job in reversed(jobs) if one.matches(job.id, job.tags)]
        # If a job's row cannot be read, the change itself reports this.
        found = found or [one.first] * (one.is_id and one.first in others)
        ids |= dict.fromkeys(found)
        lacking += [] if found else [one.lack]
    if lacking:
        raise UserError(f"{join_words(lacking)}; `sae-tui jobs` lists them")
    for job_id in ids:
        context.data.refuse_links(job_id)
    named = frozenset(one.first for one in selectors if one.is_id)
    is_single = len({*selectors}) == 1 and selectors[0].is_id
    return Selection(tuple(ids), named, is_single, {job.id: job for job in jobs if job.id in ids})


def _all_jobs(data: DataDir) -> tuple[list[Job], frozenset[int]]:
    """Return all jobs, newest first, and the ids of the unreadable rows."""
    if not data.control_db.exists():
        return [], frozenset()
    with contextlib.closing(Control(data.control_db, readonly=True)) as control:
        return control.jobs(), control.unreadable


def change(context: CommandContext, chosen: Selection, edit: Change, done: str) -> int:
    """Change the selected jobs, report on each of them, and return the exit code; `done` is a word like `held`.

    For a single id, raise an error if the change does not apply.
    """
    if chosen.is_single:
        return tell(context, chosen.ids[0], change_one(context.data, chosen.ids[0], edit))
    with Progress(done, to_descriptor=False):
        outcomes = list(track(change_all(context.data, chosen.ids, edit), "jobs", len(chosen.ids)))
    return report(context, outcomes, done)


def change_one(data: DataDir, job_id: int, edit: Change) -> str:
    """Change a single job and return a message; raise `UserError` if the change does not apply."""
    with existing(data, job_id) as control:
        try:
            return edit(data, control, job_id)
        except NothingToDo as error:
            return str(error)


def tell(context: CommandContext, job_id: int, message: str) -> int:
    """Report the change to a single job."""
    if context.as_json:
        show_json({"id": job_id, "message": message})
    else:
        say(message)
    return Exit.DONE


def report(context: CommandContext, outcomes: Sequence[ChangeOutcome], done: str) -> int:
    """Print a line per job and, for many jobs, a summary; return the exit code: 1 if nothing was done or a job failed.

    Jobs with the same message, such as an invalid note, share a line.
    """
    has_done(summary(outcomes, done))
    if context.as_json:
        show_json(outcomes)
    else:
        for outcome, message in dict.fromkeys((one.outcome, one.message) for one in outcomes):
            if outcome == "done":
                say(message)
            else:
                warn(f"{outcome}: {message}")
        if len(outcomes) >= MANY:
            say(summary(outcomes, done))
    kinds = {one.outcome for one in outcomes}
    return Exit.DONE if "done" in kinds and "failed" not in kinds else Exit.FAILED


def refuse_without_terminal(command: str) -> None:
    if not sys.stdin.isatty():
        raise UserError(f"{command} asks for confirmation, which needs a terminal; in a script add --yes")


def confirm(question: str, refused: str) -> None:
    """Ask on the terminal; raise `UserError` with the message `refused` if the answer is not yes."""
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError(refused)


def bad_usage(message: str, fix: str) -> BadUsage:
    """Return an error for arguments that only the command itself can check."""
    return BadUsage(message, f"sae-tui: error: {message}; {fix}\n", fix)


def named_jobs(job_ids: Iterable[int]) -> str:
    """Return jobs as text: `job 7`, `jobs 7 and 9` or, for many, `jobs 7-40, 52`."""
    ids = sorted(job_ids)
    words = join_words([str(job_id) for job_id in ids]) if len(ids) < MANY else ranges(ids)
    return f"job{'s' * (len(ids) > 1)} {words}"
