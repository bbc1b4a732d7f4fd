"""Changes many jobs in a few transactions; skips a job if the change does not apply to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from sae_tui.jobs.edits import NotApplicable
from sae_tui.jobs.store_access import existing
from trainer.contract.errors import UserError, sentence
from trainer.contract.paths import DataDir
from trainer.contract.store.database import LONGEST_TRANSACTION_S, StoreError
from trainer.contract.store.job_store import Control
from trainer.contract.wording import plural

# Changes a job in an open store, and returns a message.
Change = Callable[[DataDir, Control, int], str]
# Sends a request to a job's supervisor, and returns a message.
Request = Callable[[DataDir, int, Control], str]


class ChangeOutcome(msgspec.Struct, frozen=True):
    """The result of changing a job: a sentence, and whether the job was changed."""

    id: int
    message: str
    outcome: Literal["done", "skipped", "failed"] = "done"


class NothingToDo(NotApplicable):
    """Raised for a job already in the desired state, such as one that has ended; not an error for a single job."""


def change_all(data: DataDir, job_ids: Sequence[int], change: Change) -> Iterator[ChangeOutcome]:
    """Change the jobs, and yield each outcome once it is stored; raise `StoreError` if the store cannot be used."""
    left = list(job_ids)
    if not left:
        return
    with existing(data, left[0]) as control:
        while left:
            outcomes: list[ChangeOutcome] = []
            until = time.monotonic() + LONGEST_TRANSACTION_S
            with control.together():
                while left and (not outcomes or time.monotonic() < until):
                    outcomes.append(attempt(left.pop(0), lambda job_id: _change_whole(data, control, job_id, change)))
            yield from outcomes


def _change_whole(data: DataDir, control: Control, job_id: int, change: Change) -> str:
    """Change a job; if that fails, leave its row unchanged."""
    with control.together():
        return change(data, control, job_id)


def attempt(job_id: int, act: Callable[[int], str]) -> ChangeOutcome:
    """Act on a job and return the outcome; raise only errors that affect the whole store."""
    try:
        return ChangeOutcome(job_id, act(job_id))
    except StoreError:
        raise
    except NotApplicable as error:
        return ChangeOutcome(job_id, str(error), "skipped")
    except (UserError, OSError) as error:
        return ChangeOutcome(job_id, sentence(error), "failed")


def unless_ended(request: Request) -> Change:
    """Return a change that sends a request to an active job, but does not apply to a job that has ended."""

    def change(data: DataDir, control: Control, job_id: int) -> str:
        has_ended = control.job(job_id).state.is_final
        message = request(data, job_id, control)
        if has_ended:
            raise NothingToDo(message)
        return message

    return change


def summary(outcomes: Sequence[ChangeOutcome], done: str) -> str:
    """Return text like `20 jobs: 17 held, 3 skipped`; `done` is the word for the changed jobs."""
    words = {"done": done, "skipped": "skipped", "failed": "failed"}
    counts = {outcome: sum(one.outcome == outcome for one in outcomes) for outcome in words}
    parts = [f"{counts[outcome]} {word}" for outcome, word in words.items() if counts[outcome] or outcome == "done"]
    return f"{plural(len(outcomes), 'job')}: {', '.join(parts)}"
