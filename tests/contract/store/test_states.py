"""The transitions of a job's state, each tried against the store."""

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
    """Open one store for all pairs of states; every test has its own job."""
    with contextlib.closing(Control(tmp_path_factory.mktemp("states") / "control.db")) as opened:
        yield opened


@pytest.mark.parametrize(("start", "to"), itertools.product(JobState, JobState))
def test_a_move_is_made_exactly_when_the_table_has_it(
    store: Control, queued: Callable[..., Job], start: JobState, to: JobState
) -> None:
    job_id = store.create_job(queued(state=start, error="before"))
    legal = str(to) in LEGAL.get(str(start), set())
    assert store.transition(job_id, to, error="why") is legal
    job = store.job(job_id)
    assert job.state is (to if legal else start)
    assert job.error == ("why" if legal else "before")
    assert (job.ended is not None) == (legal and to.is_final)


def test_the_final_states_are_left_only_by_way_of_the_queue() -> None:
    assert {str(state) for state in JobState if state.is_final} == FINAL
    assert {state for state in JobState if TRANSITIONS[state] != {JobState.QUEUED}} == ACTIVE


def test_every_active_state_can_end_badly() -> None:
    assert all(JobState.LOST in TRANSITIONS[state] and JobState.FAILED in TRANSITIONS[state] for state in ACTIVE)
