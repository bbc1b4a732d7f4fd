"""The states of a job and the moves between them."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job is; the values are the words that users and scripts see."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        return not TRANSITIONS[self]


_END = frozenset({JobState.STOPPED, JobState.FINISHED, JobState.FAILED, JobState.LOST})
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.STOPPED, JobState.FAILED, JobState.LOST}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.STOPPING}) | _END,
    JobState.RUNNING: frozenset({JobState.STALLED, JobState.STOPPING}) | _END,
    JobState.STALLED: frozenset({JobState.RUNNING, JobState.STOPPING}) | _END,
    JobState.STOPPING: _END,
    JobState.STOPPED: frozenset(),
    JobState.FINISHED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.LOST: frozenset(),
}
ACTIVE = frozenset(state for state in JobState if not state.is_final)
