"""Job states and the transitions between them."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """The state of a job; the values are shown to users and scripts."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    # The job has never run: its SAE was imported from another tool.
    IMPORTED = "imported"

    @property
    def is_final(self) -> bool:
        """Whether the job has no running process and leaves this state only if it is resumed."""
        return self in _END


# The states in which a run can end.
_ENDED = frozenset({JobState.STOPPED, JobState.FINISHED, JobState.FAILED, JobState.LOST})
_END = _ENDED | {JobState.IMPORTED}
# Once a job is in one of these states, the jobs that depend on it can start.
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
# A job in one of these states has a supervisor and holds its GPUs.
RUNNING = ACTIVE - {JobState.QUEUED}
