"""Groups an array's jobs, or a job and its clones, so that a list shows them as one entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from sae_tui.jobs.states import HELD, PAUSED, describe_state
from sae_tui.jobs.view.reader import JobView
from trainer.contract.store.states import JobState
from trainer.contract.wording import plural

# The order of states in an array's summary. The bar shows how many jobs have finished, so the state `finished` comes
# last and may be cut off.
_ORDER = (
    "starting", "running", "cooling", "stalled", "stopping", "queued", HELD.word, PAUSED.word, "failed", "lost",
    "stopped", "finished",
)  # fmt: skip
_LEAST_FAMILY = 3


class ArrayView(msgspec.Struct, frozen=True):
    """An array in a list of jobs: its id, which is the id of its first job, and its listed jobs.

    A "family" (a job and its clones) is shown in the same way; its id is the lowest id of its listed jobs.
    """

    id: int
    jobs: tuple[JobView, ...]
    kind: Literal["array", "family"] = "array"

    @property
    def title(self) -> str:
        """The displayed title, like `array 12`."""
        return f"{self.kind} {self.id}"

    @property
    def words(self) -> str:
        """The number of jobs in each state, like `array 12 · 32 jobs · 4 running · 20 queued · 8 finished`."""
        counts = Counter(describe_state(job).word for job in self.jobs)
        states = sorted(counts, key=lambda word: _ORDER.index(word) if word in _ORDER else len(_ORDER))
        return " · ".join([self.title, plural(len(self.jobs), "job"), *(f"{counts[w]} {w}" for w in states)])

    @property
    def progress(self) -> float:
        """The share of the jobs that have finished."""
        return sum(job.state is JobState.FINISHED for job in self.jobs) / len(self.jobs)

    @property
    def name(self) -> str:
        """The leading words that all jobs' names share, or the first job's name if they share none."""
        words = [job.name.split() for job in self.jobs]
        same = []
        for column in zip(*words, strict=False):
            if len({*column}) > 1:
                break
            same.append(column[0])
        return " ".join(same) or min(self.jobs, key=lambda job: job.id).name

    @property
    def shown(self) -> JobView:
        """The job shown for the whole array: a running one or, if none is running, the newest."""
        active = [job for job in self.jobs if not job.state.is_final and job.state != JobState.QUEUED]
        return (active or self.jobs)[0]


def fold(jobs: Sequence[JobView], *, families: bool = False) -> list[JobView | ArrayView]:
    """Return the jobs in order, with each array in place of its first listed job; do not fold a single job.

    With `families`, also fold a job and its clones, if at least three of them are listed.
    """
    groups: dict[tuple[str, int], list[JobView]] = {}
    parents = {job.id: job.parent for job in jobs} if families else {}
    keys = {job.id: _group(job, parents) for job in jobs}
    for job in jobs:
        groups.setdefault(keys[job.id], []).append(job)
    entries: list[JobView | ArrayView] = []
    for job in jobs:
        kind, group_id = keys[job.id]
        group = groups[kind, group_id]
        if len(group) < (_LEAST_FAMILY if kind == "family" else 2):
            entries.append(job)
        elif group[0] is job and kind == "family":
            entries.append(ArrayView(min(one.id for one in group), tuple(group), "family"))
        elif group[0] is job:
            entries.append(ArrayView(group_id, tuple(group)))
    return entries


def _group(job: JobView, parents: Mapping[int, int | None]) -> tuple[str, int]:
    """Return the group that a job belongs to: its array, or the original job of its chain of clones."""
    if job.array is not None:
        return "array", job.array
    origin, seen = job.id, {job.id}
    while (parent := parents.get(origin)) is not None and parent not in seen:
        origin = parent
        seen.add(origin)
    return "family", origin
