"""Filters jobs by search terms, which must all match, and sorts jobs."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from sae_tui.jobs.output import kind_of
from sae_tui.jobs.queue.after import comes_after
from sae_tui.jobs.states import PAUSED, describe_state, is_ranked
from sae_tui.jobs.view.reader import judged_value
from sae_tui.jobs.view.shape import largest_d_sae, largest_k
from trainer.contract.errors import UserError
from trainer.contract.settings.catalog import Series
from trainer.contract.settings.series import CRITERION, LOSS, key_metrics, result_metrics
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

J = TypeVar("J", bound=Job)

# The order of states in a sorted list: active and queued jobs come first, followed by failed jobs.
_STATES = (
    JobState.RUNNING, JobState.STALLED, JobState.STARTING, JobState.STOPPING, JobState.QUEUED, JobState.FAILED,
    JobState.LOST, JobState.STOPPED, JobState.FINISHED, JobState.IMPORTED,
)  # fmt: skip
_QUEUE = "queue"
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


class JobOrder(msgspec.Struct, frozen=True):
    """A sort order: the value to sort by, or None if a job has no value, and its usual direction.

    The direction applies only within a group: jobs whose group is False come first, and jobs without a value come last.
    """

    key: Callable[[Any], Any]
    descends: bool = False
    group: Callable[[Any], bool] = lambda _: False

    def sort(self, jobs: Sequence[J], *, reverse: bool = False) -> list[J]:
        known = {job.id: self.key(job) for job in jobs}
        with_value = [job for job in jobs if known[job.id] is not None]
        ordered = sorted(with_value, key=lambda job: known[job.id], reverse=self.descends != reverse)
        return [*sorted(ordered, key=self.group), *(job for job in jobs if known[job.id] is None)]


def sort_jobs(jobs: Iterable[J], by: str, *, reverse: bool = False) -> list[J]:
    """Sort the jobs by one of `orders`; tied jobs are sorted newest first, and jobs without a value come last."""
    newest = sorted(jobs, key=lambda job: -job.id)
    return _queue_first(newest, reverse=reverse) if by == _QUEUE else orders()[by].sort(newest, reverse=reverse)


def find(
    jobs: Iterable[J], text: str = "", by: str = "newest", limit: int | None = None, *, reverse: bool = False
) -> list[J]:
    """Return the first `limit` matching jobs in the order `by`; raise `UserError` if this order does not exist."""
    if by not in (names := orders()):
        raise UserError(f'jobs can be sorted by {", ".join(names)}, not by "{by}"')
    return sort_jobs(filter_jobs(jobs, text), by, reverse=reverse)[:limit]


def architectures(job: Job) -> str:
    """Return a job's SAE architecture, such as `topk`; for a sweep, return several, such as `topk batch_topk`."""
    return _architectures(job.config)


def waits(job: Job) -> str:
    """Return a short reason why a job is waiting, shown after the job's state, or "" if it is not waiting.

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


def _by_number(name: str) -> list[str | int]:
    """Return a sort key that compares numbers in a name by value, so `k=8` comes before `k=16`."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split("([0-9]+)", name.casefold()))]


def _by_value(name: str, series: Series) -> JobOrder:
    """Return the sort order for a metric, best first; unfinished jobs come after all finished jobs."""

    def key(job: Job) -> float | None:
        value, is_of_batch = judged_value(job, name)
        # Ignore values measured on training batches, which are lower than values on held-out rows.
        return None if is_of_batch else value

    is_quality = series.better is not None
    return JobOrder(key, series.better == "higher", lambda job: is_quality and not is_ranked(job))


def _queue_first(newest: Sequence[J], *, reverse: bool) -> list[J]:
    waiting = [job for job in newest if job.state == JobState.QUEUED]
    if not waiting:
        return [*newest]
    # Import late: most lists have no queued job, and this import takes a tenth of a command's start-up time.
    from sae_tui.jobs.queue.order import in_order

    line = in_order(waiting)
    rest = [job for job in newest if job.state != JobState.QUEUED]
    return [*(reversed(line) if reverse else line), *rest]


def run_seconds(job: Job) -> float | None:
    """Return how many seconds a job has been running or, once it has ended, ran in total; None before its start."""
    end = job.ended if job.state.is_final else time.time()
    return None if job.started is None or end is None else max(0.0, end - job.started)


def orders() -> dict[str, JobOrder]:
    """Return the sort orders by name; metrics are sorted best first."""
    metrics = key_metrics() | result_metrics()
    by_value = {CRITERION: metrics[CRITERION], "loss": LOSS, **metrics}
    return {
        "newest": JobOrder(lambda job: job.id, descends=True),
        "name": JobOrder(lambda job: _by_number(job.name)),
        "state": JobOrder(lambda job: (_STATES.index(job.state), job.held)),
        **{name: _by_value(name, series) for name, series in by_value.items()},
        "k": JobOrder(lambda job: largest_k(job.config)),
        "d_sae": JobOrder(lambda job: largest_d_sae(job.config, job.d_in)),
        "progress": JobOrder(lambda job: job.step / job.total_steps if job.total_steps else None, descends=True),
        "step": JobOrder(lambda job: job.step or None, descends=True),
        "tokens": JobOrder(lambda job: job.tokens or None, descends=True),
        "tokens_per_s": JobOrder(lambda job: job.tokens_per_s, descends=True),
        "eta": JobOrder(lambda job: getattr(job, "eta_s", None)),
        "took": JobOrder(run_seconds, descends=True),
        "started": JobOrder(lambda job: job.started, descends=True),
        "user": JobOrder(lambda job: job.user or None),
        "host": JobOrder(lambda job: job.host or None),
        "memory": JobOrder(lambda job: job.peak_memory_bytes, descends=True),
        "gpus": JobOrder(lambda job: job.gpu_ids or None),
        "arch": JobOrder(lambda job: architectures(job) or None),
        _QUEUE: JobOrder(lambda job: job.id),
    }
