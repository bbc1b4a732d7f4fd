"""Tests that the store allows the state transitions in the table, and refuses all others."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest

from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import ACTIVE, TRANSITIONS, JobState

ENDED = {"stopped", "finished", "failed", "lost"}
FINAL = ENDED | {"imported"}
LEGAL = {
    "queued": {"starting", "stopped", "failed", "lost"},
    "starting": {"running", "stopping", "starting"} | ENDED,
    "running": {"stalled", "stopping", "starting"} | ENDED,
    "stalled": {"running", "stopping", "starting"} | ENDED,
    "stopping": ENDED | {"queued"},
    **{state: {"queued"} for state in FINAL},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    """Open one store for all pairs of states. Each test creates its own job."""
    with contextlib.closing(Control(tmp_path_factory.mktemp("states") / "control.db")) as opened:
        yield opened


@pytest.mark.parametrize(("start", "to"), itertools.product(JobState, JobState))
def test_only_transitions_in_the_table_are_possible(
    store: Control, queued: Callable[..., Job], start: JobState, to: JobState
) -> None:
    job_id = store.create_job(queued(state=start, error="before"))
    legal = str(to) in LEGAL.get(str(start), set())
    assert store.transition(job_id, to, error="why") is legal
    job = store.job(job_id)
    assert job.state is (to if legal else start)
    assert job.error == ("why" if legal else "before")
    assert (job.ended is not None) == (legal and to.is_final)


def test_the_only_transition_from_a_final_state_is_back_to_the_queue() -> None:
    assert {str(state) for state in JobState if state.is_final} == FINAL
    assert {state for state in JobState if TRANSITIONS[state] != {JobState.QUEUED}} == ACTIVE


def test_each_active_state_can_become_lost_or_failed() -> None:
    assert all(JobState.LOST in TRANSITIONS[state] and JobState.FAILED in TRANSITIONS[state] for state in ACTIVE)
