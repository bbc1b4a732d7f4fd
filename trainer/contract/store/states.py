"""The states of a job and the moves between them."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """The state of a job; the values are the words that users and scripts see."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    # The job has not run: its SAE comes from another tool.
    IMPORTED = "imported"

    @property
    def is_final(self) -> bool:
        """Whether no process of the job lives; only resuming it changes the state."""
        return self in _END


# How a run ends.
_ENDED = frozenset({JobState.STOPPED, JobState.FINISHED, JobState.FAILED, JobState.LOST})
_END = _ENDED | {JobState.IMPORTED}
# The states that a dependent job waits for.
DONE = frozenset({JobState.FINISHED, JobState.IMPORTED})
# A job that is restarted after a crash keeps its GPUs.
_AGAIN = frozenset({JobState.STARTING})
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.STOPPED, JobState.FAILED, JobState.LOST}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.STOPPING}) | _AGAIN | _ENDED,
    JobState.RUNNING: frozenset({JobState.STALLED, JobState.STOPPING}) | _AGAIN | _ENDED,
    JobState.STALLED: frozenset({JobState.RUNNING, JobState.STOPPING}) | _AGAIN | _ENDED,
    # A pause ends in the queue.
    JobState.STOPPING: _ENDED | {JobState.QUEUED},
    **dict.fromkeys(_END, frozenset({JobState.QUEUED})),
}
ACTIVE = frozenset(state for state in JobState if not state.is_final)
