"""Filters jobs by search terms, which must all match, and sorts jobs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from sae_tui.jobs.output import kind_of
from sae_tui.jobs.queue.after import comes_after
from sae_tui.jobs.queue.order import in_order
from sae_tui.jobs.states import PAUSED, describe_state, is_ranked
from sae_tui.jobs.view.reader import judged_value
from trainer.contract.errors import UserError
from trainer.contract.settings.catalog import Series
from trainer.contract.settings.series import CRITERION, LOSS, key_metrics
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

J = TypeVar("J", bound=Job)

# The order of states in a sorted list: active and queued jobs come first, followed by failed jobs.
_STATES = (
    JobState.RUNNING, JobState.STALLED, JobState.STARTING, JobState.STOPPING, JobState.QUEUED, JobState.FAILED,
    JobState.LOST, JobState.STOPPED, JobState.FINISHED, JobState.IMPORTED,
)  # fmt: skip
_ARCHITECTURE = re.compile(r"^\s*architecture\s*=\s*(\[[^\]]*\]|.+)$", re.MULTILINE)


class Term(msgspec.Struct, frozen=True):
    """A search term, which must occur in the given field of a job, or in any field if `field` is ""."""

    text: str
    field: str = ""

    def matches(self, job: Job) -> bool:
        if self.field:
            return FIELDS[self.field](job, self.text)
        return any(match(job, self.text) for match in FIELDS.values())


def parse(text: str) -> tuple[Term, ...]:
    """Split text like `wide #good state:failed` into terms; ignore a `#` or `field:` that is not followed by text."""
    return tuple(term for word in text.split() if (term := _term(word.casefold())).text)


def filter_jobs(jobs: Iterable[J], text: str) -> list[J]:
    """Return the jobs that match every term in `text`, in their original order."""
    terms = parse(text)
    return [job for job in jobs if all(term.matches(job) for term in terms)]


def sort_jobs(jobs: Iterable[J], by: str) -> list[J]:
    """Sort the jobs by one of `orders`; tied jobs are sorted newest first, and jobs without a value come last."""
    newest = sorted(jobs, key=lambda job: -job.id)
    return orders()[by](newest)


def find(jobs: Iterable[J], text: str = "", by: str = "newest", limit: int | None = None) -> list[J]:
    """Return the first `limit` matching jobs in the order `by`; raise `UserError` if this order does not exist."""
    if by not in (names := orders()):
        raise UserError(f'jobs can be sorted by {", ".join(names)}, not by "{by}"')
    return sort_jobs(filter_jobs(jobs, text), by)[:limit]


def architectures(job: Job) -> str:
    """Return a job's SAE architecture, such as `topk`; for a sweep, return several, such as `topk batch_topk`."""
    return _architectures(job.config)


def waits(job: Job) -> str:
    """Return a short reason why a job is waiting, shown after the job's state; "" if it is not waiting.

    If the job's priority is not 0, the text starts with the priority. If the job's host is silent, the text says so.
    """
    if silent := getattr(job, "silent", ""):
        return str(silent)
    if job.state != JobState.QUEUED:
        return ""
    reason = _held_reason(job) if job.held else (job.waits_for or "in the queue")
    return f"priority {job.priority} · {reason}" if job.priority else reason


def _held_reason(job: Job) -> str:
    """Describe why a job is held, like `until released; comes after job 4`, or `at step 501, until resumed`."""
    word = describe_state(job).word
    waits_for = job.waits_for or ""
    # Until the supervisor polls again, the row contains the reason for waiting from before the job was held.
    other = waits_for.removeprefix(word).removeprefix("; ") if waits_for.startswith(word) else comes_after(job.after)
    until = (
        f"at {kind_of(job.config).unit} {job.step}, until resumed"
        if describe_state(job) == PAUSED
        else "until released"
    )
    return f"{until}; {other}" if other else until


@functools.lru_cache(maxsize=4096)
def _architectures(config: str) -> str:
    # A TOML parser takes 0.5 ms per job and a list may contain a thousand jobs, so use a regular expression.
    match = _ARCHITECTURE.search(config)
    return " ".join(re.findall(r"\w+", match[1])).casefold() if match else ""


def _term(word: str) -> Term:
    if word.startswith("#"):
        return Term(word[1:], "tag")
    field, colon, text = word.partition(":")
    return Term(text, field) if colon and field in FIELDS else Term(word)


def _contains(name: str) -> Callable[[Job, str], bool]:
    return lambda job, text: text in getattr(job, name).casefold()


def _has_tag(job: Job, text: str) -> bool:
    return any(tag.casefold().startswith(text) for tag in job.tags)


# The fields a term can name before its colon, each with a match function. The text after the colon is casefolded.
FIELDS: dict[str, Callable[[Job, str], bool]] = {
    "name": _contains("name"),
    "tag": _has_tag,
    "state": lambda job, text: describe_state(job).word.startswith(text),
    "arch": lambda job, text: text in architectures(job),
    "user": lambda job, text: job.user.casefold().startswith(text),
    "note": _contains("note"),
    "id": lambda job, text: str(job.id) == text,
}


def _by(key: Callable[[Job], Any]) -> Callable[[list[J]], list[J]]:
    return lambda jobs: sorted(jobs, key=key)


def _by_number(name: str) -> list[str | int]:
    """Return a sort key that compares numbers in a name by value, so `k=8` comes before `k=16`."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split("([0-9]+)", name.casefold()))]


def _by_value(name: str, series: Series) -> Callable[[list[J]], list[J]]:
    sign = -1 if series.better == "higher" else 1
    is_quality = series.better is not None

    def key(job: Job) -> tuple[bool, bool, float]:
        value, is_of_batch = judged_value(job, name)
        # Ignore values measured on training batches, which are lower than values on held-out rows.
        known = None if is_of_batch else value
        # Sort unfinished jobs after all finished jobs.
        return known is None, is_quality and not is_ranked(job), sign * (known or 0.0)

    return _by(key)


def _queue_first(jobs: Sequence[J]) -> list[J]:
    line = in_order(job for job in jobs if job.state == JobState.QUEUED)
    return [*line, *(job for job in jobs if job.state != JobState.QUEUED)]  # type: ignore[list-item]


def orders() -> dict[str, Callable[[list[Any]], list[Any]]]:
    """Return a dict mapping the name of each sort order to its sort function; metrics are sorted best first."""
    metrics = key_metrics()
    by_value = {CRITERION: metrics[CRITERION], "loss": LOSS, **metrics}
    return {
        "newest": list,
        "name": _by(lambda job: _by_number(job.name)),
        "state": _by(lambda job: (_STATES.index(job.state), job.held)),
        **{name: _by_value(name, series) for name, series in by_value.items()},
        "queue": _queue_first,
    }
