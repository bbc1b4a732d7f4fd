"""Groups the jobs of an array, so that a list shows them as one entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from sae_tui.jobs.states import HELD, PAUSED, describe_state
from sae_tui.jobs.view.reader import JobView
from trainer.contract.store.states import JobState
from trainer.contract.wording import plural

# The order of states in an array's summary. The bar shows how many have finished, so that state may be cut off.
_ORDER = (
    "starting", "running", "cooling", "stalled", "stopping", "queued", HELD.word, PAUSED.word, "failed", "lost",
    "stopped", "finished",
)  # fmt: skip


class ArrayView(msgspec.Struct, frozen=True):
    """An array in a list of jobs: its id, which is the id of its first job, and its listed jobs."""

    id: int
    jobs: tuple[JobView, ...]

    @property
    def words(self) -> str:
        """The number of jobs in each state, like `array 12 · 32 jobs · 4 running · 20 queued · 8 finished`."""
        counts = Counter(describe_state(job).word for job in self.jobs)
        states = sorted(counts, key=lambda word: _ORDER.index(word) if word in _ORDER else len(_ORDER))
        return " · ".join([f"array {self.id}", plural(len(self.jobs), "job"), *(f"{counts[w]} {w}" for w in states)])

    @property
    def progress(self) -> float:
        """The share of the jobs that have finished."""
        return sum(job.state is JobState.FINISHED for job in self.jobs) / len(self.jobs)

    @property
    def name(self) -> str:
        """The words that the names of all jobs begin with, or the first job's name."""
        words = [job.name.split() for job in self.jobs]
        same = []
        for column in zip(*words, strict=False):
            if len({*column}) > 1:
                break
            same.append(column[0])
        return " ".join(same) or min(self.jobs, key=lambda job: job.id).name

    @property
    def shown(self) -> JobView:
        """The job shown for the whole array: one that runs or, if none does, the newest."""
        active = [job for job in self.jobs if not job.state.is_final and job.state != JobState.QUEUED]
        return (active or self.jobs)[0]


def fold(jobs: Sequence[JobView]) -> list[JobView | ArrayView]:
    """Return the jobs in their order, with an array in place of its first listed job; a single job is not folded."""
    members: dict[int, list[JobView]] = {}
    for job in jobs:
        if job.array is not None:
            members.setdefault(job.array, []).append(job)
    entries: list[JobView | ArrayView] = []
    for job in jobs:
        group = members.get(job.array, []) if job.array is not None else []
        if len(group) < 2:
            entries.append(job)
        elif group[0] is job:
            assert job.array is not None
            entries.append(ArrayView(job.array, tuple(group)))
    return entries
