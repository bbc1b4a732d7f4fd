"""The states of a job and the transitions between them."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """The state of a job; users and scripts see these values."""

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
        """True if no process of the job is running and only resuming the job changes the state."""
        return self in _END


# The states in which a run can end.
_ENDED = frozenset({JobState.STOPPED, JobState.FINISHED, JobState.FAILED, JobState.LOST})
_END = _ENDED | {JobState.IMPORTED}
# The states that a dependent job waits for.
DONE = frozenset({JobState.FINISHED, JobState.IMPORTED})
# A job that restarts after a crash keeps its GPUs.
_AGAIN = frozenset({JobState.STARTING})
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.STOPPED, JobState.FAILED, JobState.LOST}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.STOPPING}) | _AGAIN | _ENDED,
    JobState.RUNNING: frozenset({JobState.STALLED, JobState.STOPPING}) | _AGAIN | _ENDED,
    JobState.STALLED: frozenset({JobState.RUNNING, JobState.STOPPING}) | _AGAIN | _ENDED,
    # A paused job returns to the queue.
    JobState.STOPPING: _ENDED | {JobState.QUEUED},
    **dict.fromkeys(_END, frozenset({JobState.QUEUED})),
}
ACTIVE = frozenset(state for state in JobState if not state.is_final)
