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

    @property
    def is_final(self) -> bool:
        """Whether no process of the job lives; only resuming it changes the state."""
        return self in _END


_END = frozenset({JobState.STOPPED, JobState.FINISHED, JobState.FAILED, JobState.LOST})
# A job that is restarted after a crash keeps its GPUs.
_AGAIN = frozenset({JobState.STARTING})
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.STOPPED, JobState.FAILED, JobState.LOST}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.STOPPING}) | _AGAIN | _END,
    JobState.RUNNING: frozenset({JobState.STALLED, JobState.STOPPING}) | _AGAIN | _END,
    JobState.STALLED: frozenset({JobState.RUNNING, JobState.STOPPING}) | _AGAIN | _END,
    # A pause ends in the queue.
    JobState.STOPPING: _END | {JobState.QUEUED},
    **dict.fromkeys(_END, frozenset({JobState.QUEUED})),
}
ACTIVE = frozenset(state for state in JobState if not state.is_final)
