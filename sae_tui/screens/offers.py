"""The actions possible in each job state, which determine the keys offered."""

from __future__ import annotations

from collections.abc import Mapping

from sae_tui.jobs.output import kind_of
from sae_tui.jobs.view.arrays import ArrayView
from sae_tui.jobs.view.reader import JobView
from trainer.contract.store.rows import Job
from trainer.contract.store.states import DONE, JobState

_ALIVE = {"open": "Open", "stop": "Stop", "pause": "Pause", "log": "Log", "clone": "Clone"}
_STOPPING = {"open": "Open", "stop": "End now", "log": "Log", "clone": "Clone"}
_WAITING = {"hold": "Hold", "stop": "Cancel", "after": "After", "sooner": "Sooner", "open": "Open", "clone": "Clone"}
_HELD = {"continue": "Resume", "hold": "Release", "stop": "Cancel", "after": "After", "open": "Open", "clone": "Clone"}
# While a job's SAEs are being evaluated, the stop key stops the evaluation.
_EVALUATED = {"open": "Open", "stop": "Stop", "log": "Log", "clone": "Clone"}
_FINISHED = {"open": "Open", "clone": "Clone", "mark": "Mark", "compare": "Compare", "delete": "Delete"}
_ENDED = {"open": "Open", "continue": "Resume", "clone": "Clone", "log": "Log", "mark": "Mark", "delete": "Delete"}
# An ended command can always run again, since it has no checkpoint to resume from.
_RAN = _ENDED | {"continue": "Run again"}


_LOOKS = frozenset({"open", "log", "mark", "compare"})


def offers_for(job: Job, *, readonly: bool = False) -> Mapping[str, str]:
    """Return the actions applicable to a job in its current state, most important first, each with its label.

    With `readonly`, return only actions that make no changes.
    """
    offered = _offers(job)
    return {verb: word for verb, word in offered.items() if verb in _LOOKS} if readonly else offered


def offers_for_array(array: ArrayView, *, is_open: bool, readonly: bool = False) -> Mapping[str, str]:
    """Return the actions applicable to an array's jobs, most important first, each with its label."""
    offered = {"open": "Fold" if is_open else "Unfold"}
    if readonly:
        return offered
    queued = [job for job in array.jobs if job.state == JobState.QUEUED]
    if queued:
        offered["hold"] = "Release all" if all(job.held for job in queued) else "Hold all"
    if all(job.state.is_final for job in array.jobs):
        return offered | {"mark": "Mark", "delete": "Delete all"}
    return offered | {"stop": "Stop all", **({"sooner": "Sooner"} if queued else {}), "mark": "Mark"}


def _offers(job: Job) -> Mapping[str, str]:
    if isinstance(job, JobView) and job.evaluation:
        return _EVALUATED
    if job.state == JobState.QUEUED:
        return _HELD if job.held else _WAITING
    if job.state == JobState.STOPPING:
        return _STOPPING
    if not job.state.is_final:
        return _ALIVE
    if kind_of(job.config).is_program:
        return _RAN
    return _FINISHED if job.state in DONE else _ENDED
