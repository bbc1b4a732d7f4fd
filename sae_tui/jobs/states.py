"""The displayed name and symbol for each job state, shared by all screens, commands and filters."""

from __future__ import annotations

from typing import NamedTuple

from trainer.contract.store.metrics_store import COOLING
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState
from trainer.contract.wording import plural


class Shown(NamedTuple):
    """The word, symbol and style of a state; `style` is a colour, so states must not differ in style alone."""

    word: str
    sign: str
    style: str


_SHOWN = {
    JobState.QUEUED: Shown("queued", "◌", "dim"),
    JobState.STARTING: Shown("starting", "◔", "accent"),
    JobState.RUNNING: Shown("running", "▶", "good"),
    JobState.STALLED: Shown("stalled", "!", "warn"),
    JobState.STOPPING: Shown("stopping", "◼", "warn"),
    JobState.STOPPED: Shown("stopped", "◼", "dim"),
    JobState.FINISHED: Shown("finished", "✓", "good"),
    JobState.FAILED: Shown("failed", "✗", "bad"),
    JobState.LOST: Shown("lost", "?", "bad"),
    JobState.IMPORTED: Shown("imported", "↓", "accent"),
}
HELD = Shown("held", "‖", "dim")
PAUSED = Shown("paused", "‖", "dim")
COOLING_DOWN = Shown("cooling", "▶", "accent")
ENDED = {
    JobState.FINISHED: "has finished",
    JobState.STOPPED: "was stopped",
    JobState.FAILED: "failed",
    JobState.LOST: "was lost",
    JobState.IMPORTED: "was imported",
}


def describe_state(job: Job) -> Shown:
    """Return the word and symbol for a job's state.

    A queued job that must not start until it is released is "held", or "paused" if it has run before. A running job
    that was asked to finish early is "cooling".
    """
    if is_cooling(job):
        return COOLING_DOWN
    if job.state == JobState.QUEUED and job.held:
        return PAUSED if job.attempt else HELD
    return _SHOWN[job.state]


def is_cooling(job: Job) -> bool:
    """Return whether a running job is cooling down because it was asked to finish early."""
    return job.state == JobState.RUNNING and getattr(job, "phase", "") == COOLING


def phase_words(job: Job) -> str:
    """Describe a job's phase, such as `cooling down, 40 steps left`; return "" if the phase is unknown."""
    phase: str = getattr(job, "phase", "")
    if phase != COOLING or job.total_steps is None:
        return phase
    return f"{phase}, {plural(max(0, job.total_steps - job.step), 'step')} left"


def is_ranked(job: Job) -> bool:
    """Return whether a job can be compared with other jobs by quality, which requires completed training.

    Most of the improvement happens while the learning rate decays. Halfway through a run, the FVU is 15 % higher than
    at the end of a run that is a quarter as long. Comparing unfinished runs would favour the wrong settings.
    """
    return job.state.is_final and job.state not in (JobState.STOPPED, JobState.FAILED, JobState.LOST)


def was_resumed(job: Job) -> bool:
    """Return whether a job was resumed by its user rather than just restarted automatically.

    In a resumed job's row, `started` is the time of the latest start.
    """
    return job.attempt > job.restarts + 1


def stands(job: Job) -> str:
    """Return a job's state as a predicate appended to "job 5", such as `is running` or `has finished`."""
    return ENDED.get(job.state) or f"is {describe_state(job).word}"
