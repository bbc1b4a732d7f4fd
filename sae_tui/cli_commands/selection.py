"""Selects the jobs that a command acts on: by id, by a range of ids like `3-9`, or by tag like `#sweep`.

A command that changes several jobs reports each of them, and skips the jobs to which the change does not apply.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import say, show_json, warn
from sae_tui.cli_commands.values import Selector
from sae_tui.jobs.edits import NotApplicable
from sae_tui.jobs.store_access import existing
from trainer.contract.errors import BadUsage, UserError, sentence
from trainer.contract.exits import Exit
from trainer.contract.output import has_done
from trainer.contract.paths import DataDir
from trainer.contract.progress import Progress
from trainer.contract.store.database import StoreError
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.wording import join_words, plural, ranges

# A summary follows the lines about this many jobs or more; up to here, a sentence names each job.
MANY = 6
# Other processes wait this long while jobs are being changed.
LONGEST_TRANSACTION_S = 0.5

Change = Callable[[DataDir, Control, int], str]
Request = Callable[[DataDir, int, Control], str]


class Selection(msgspec.Struct, frozen=True):
    """The selected jobs, in the order of the arguments, and which of them are named by their ids."""

    ids: tuple[int, ...]
    named: frozenset[int]
    # Whether the argument is one id. The command then behaves as if it took only one job.
    is_single: bool
    jobs: dict[int, Job]


def select(context: CommandContext, selectors: Sequence[Selector]) -> Selection:
    """Return the selected jobs; raise `UserError` if an id, a range or a tag matches no job."""
    jobs, others = _all_jobs(context.data)
    ids: dict[int, None] = {}
    lacking: list[str] = []
    for one in dict.fromkeys(selectors):
        found = [job.id for job in reversed(jobs) if one.matches(job.id, job.tags)]
        # A row that cannot be read is reported by the change.
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


class Outcome(msgspec.Struct, frozen=True):
    """What a command did to a job: a sentence, and whether the job was changed."""

    id: int
    message: str
    outcome: Literal["done", "skipped", "failed"] = "done"


def change(context: CommandContext, chosen: Selection, edit: Change, done: str) -> int:
    """Change the selected jobs, report each of them, and return the exit code; `done` is a word like `held`.

    For a single id, raise an error if the change does not apply.
    """
    if chosen.is_single:
        return tell(context, chosen.ids[0], change_one(context.data, chosen.ids[0], edit))
    with Progress(done, to_descriptor=False) as progress:
        progress.stage("jobs", len(chosen.ids))
        outcomes = list(_changes(context.data, chosen.ids, edit, progress))
    return report(context, outcomes, done)


def change_one(data: DataDir, job_id: int, edit: Change) -> str:
    """Change a single job and return a message; raise `UserError` if the change does not apply."""
    with existing(data, job_id) as control:
        try:
            return edit(data, control, job_id)
        except AlreadyEnded as error:
            return str(error)


def tell(context: CommandContext, job_id: int, message: str) -> int:
    """Report what was done to a single job."""
    if context.as_json:
        show_json({"id": job_id, "message": message})
    else:
        say(message)
    return Exit.DONE


def _changes(data: DataDir, job_ids: Sequence[int], edit: Change, progress: Progress) -> Iterator[Outcome]:
    """Change the jobs in as few transactions as other processes allow; yield the outcomes once they are stored."""
    left = list(job_ids)
    with existing(data, left[0]) as control:
        while left:
            outcomes: list[Outcome] = []
            until = time.monotonic() + LONGEST_TRANSACTION_S
            with control.together():
                while left and time.monotonic() < until:
                    outcomes.append(attempt(left.pop(0), lambda job_id: edit(data, control, job_id)))
                    progress.advance()
            yield from outcomes


def attempt(job_id: int, act: Callable[[int], str]) -> Outcome:
    """Act on a job and return the outcome; an error of the whole store is raised."""
    try:
        return Outcome(job_id, act(job_id))
    except StoreError:
        raise
    except NotApplicable as error:
        return Outcome(job_id, str(error), "skipped")
    except (UserError, OSError) as error:
        return Outcome(job_id, sentence(error), "failed")


def report(context: CommandContext, outcomes: Sequence[Outcome], done: str) -> int:
    """Print a line for each job, and a summary of many; return the exit code, 1 if nothing was done or a job failed."""
    counts = {word: sum(one.outcome == word for one in outcomes) for word in ("done", "skipped", "failed")}
    words = {"done": done, "skipped": "skipped", "failed": "failed"}
    parts = [f"{counts[word]} {shown}" for word, shown in words.items() if counts[word] or word == "done"]
    summary = f"{plural(len(outcomes), 'job')}: {', '.join(parts)}"
    has_done(summary)
    if context.as_json:
        show_json(outcomes)
    else:
        for one in outcomes:
            say(one.message) if one.outcome == "done" else warn(f"{one.outcome}: {one.message}")
        if len(outcomes) >= MANY:
            say(summary)
    return Exit.DONE if counts["done"] and not counts["failed"] else Exit.FAILED


class AlreadyEnded(NotApplicable):
    """Raised for a job that has ended; for a single job, this is not an error."""


def unless_ended(act: Request) -> Change:
    """Return a change that asks an active job for something, and does not apply to a job that has ended."""

    def edit(data: DataDir, control: Control, job_id: int) -> str:
        has_ended = control.job(job_id).state.is_final
        message = act(data, job_id, control)
        if has_ended:
            raise AlreadyEnded(message)
        return message

    return edit


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
    """Return an error for arguments that only the command itself can judge."""
    return BadUsage(message, f"sae-tui: error: {message}; {fix}\n", fix)


def named_jobs(job_ids: Iterable[int]) -> str:
    """Return jobs as text: `job 7`, `jobs 7 and 9` or, for many, `jobs 7-40, 52`."""
    ids = sorted(job_ids)
    words = join_words([str(job_id) for job_id in ids]) if len(ids) < MANY else ranges(ids)
    return f"job{'s' * (len(ids) > 1)} {words}"
