"""Tests for actions on jobs, with a class that answers the app's questions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.box import Box

from sae_tui.actions import Actions
from sae_tui.jobs import edits
from sae_tui.jobs.view.reader import JobsReader, JobView
from sae_tui.settings import Settings
from sae_tui.widgets.confirm import Confirm
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState


class Person:
    """Replaces the app: answers every question, runs work immediately, and records the questions and messages."""

    def __init__(self) -> None:
        self.answer, self.takes_other = True, False
        self.questions: list[tuple[str, str]] = []
        self.told: list[str] = []

    def notify(self, message: str, *, severity: str, markup: bool = True) -> None:
        self.told.append(f"{severity}: {message}")

    def push_screen(self, dialog: Confirm, take: Callable[[bool], object]) -> None:
        self.questions.append((dialog.question, dialog.labels[0]))
        dialog.took_other = bool(dialog.labels[2]) and self.takes_other
        take(self.answer)

    def run_worker(self, act: Callable[[], object], **options: object) -> None:
        act()

    def call_later(self, act: Callable[..., object], *args: object) -> None:
        act(*args)

    def set_timer(self, delay_s: float, act: Callable[[], object]) -> None:
        act()


class State:
    """The current jobs in the store."""

    def __init__(self, box: Box) -> None:
        self.data, self.settings = box.data, Settings()
        self.readonly = False
        self.monitor = SimpleNamespace(latest=lambda: (), source_name="none", cuda=False)
        self.watcher = SimpleNamespace(poke=lambda: None)

    @property
    def jobs(self) -> tuple[JobView, ...]:
        reader = JobsReader(self.data)
        reader.poll()
        return reader.jobs

    def choices(self) -> tuple[()]:
        return ()


@pytest.fixture
def box(tmp_path: Path):
    box = Box(tmp_path)
    yield box
    box.close()


@pytest.fixture
def person() -> Person:
    return Person()


@pytest.fixture
def state(box: Box) -> State:
    return State(box)


@pytest.fixture
def actions(state: State, person: Person) -> Actions:
    return Actions(state, person)


def test_an_action_on_a_job_that_does_not_exist_is_reported(box: Box, actions: Actions, person: Person) -> None:
    box.record_job("a", JobState.FINISHED)
    actions.stop(7)
    assert person.told == ["warning: There is no job 7."]


def test_stopping_a_job_asks_first_and_stopping_it_again_asks_whether_to_kill_it(
    box: Box, state: State, actions: Actions, person: Person
) -> None:
    job_id = box.record_job("a", JobState.RUNNING)
    person.answer = False
    actions.stop(job_id)
    assert person.questions == [("Stop job 1 (a)? It saves a checkpoint first.", "Stop")]
    assert not state.jobs[0].stop_requested
    person.answer = True
    actions.stop(job_id)
    assert state.jobs[0].stop_requested
    actions.stop(job_id)
    assert person.questions[-1][1] == "Kill it"
    assert person.told[-1] == "information: Job 1 is killed within 5 s, even if it has not saved."


def test_a_running_training_job_can_finish_early_instead_of_being_stopped(
    box: Box, state: State, actions: Actions, person: Person
) -> None:
    job_id = box.record_job("a", JobState.RUNNING, step=200, total_steps=2000)
    person.takes_other = True
    actions.stop(job_id)
    assert "it cools down over 30 steps" in person.questions[0][0]
    assert "then finishes" in person.told[0]
    # Finishing early is not a stop, so the next request is a stop rather than a kill.
    assert not state.jobs[0].stop_requested
    person.takes_other = False
    actions.stop(job_id)
    assert person.questions[-1][1] == "Stop"


def test_stopping_an_extraction_mentions_its_complete_shards(box: Box, actions: Actions, person: Person) -> None:
    job_id = box.record_job("a", JobState.RUNNING, config='kind = "extract"\n')
    actions.stop(job_id)
    actions.stop(job_id)
    assert person.questions == [
        ("Stop job 1 (a)? It keeps its complete shards.", "Stop"),
        ("Job 1 (a) is stopping. Kill it now? Rows after its last shard will be lost.", "Kill it"),
    ]


@pytest.mark.parametrize("act", ["stop", "pause"])
def test_acting_on_an_ended_job_reports_how_it_ended(act: str, box: Box, actions: Actions, person: Person) -> None:
    getattr(actions, act)(box.record_job("a", JobState.FINISHED))
    assert (person.told, person.questions) == (["warning: Job 1 has finished."], [])


def test_deleted_jobs_can_be_restored_in_reverse_order(
    box: Box, state: State, actions: Actions, person: Person
) -> None:
    ids = [box.record_job(name, JobState.FINISHED) for name in "abc"]
    for job_id in ids:
        box.data.run(job_id).create()
    actions.delete(ids[:2])
    actions.delete(ids[2:])
    assert state.jobs == ()
    actions.undo_delete()
    assert [job.name for job in state.jobs] == ["c"]
    actions.undo_delete()
    assert sorted(job.name for job in state.jobs) == ["a", "b", "c"]
    actions.undo_delete()
    assert person.told[-1] == "warning: No job has been deleted since the app started."


def test_a_running_job_is_not_deleted(box: Box, state: State, actions: Actions, person: Person) -> None:
    actions.delete([box.record_job("a", JobState.RUNNING)])
    assert (person.told, person.questions) == (["warning: Job 1 is running; stop it first."], [])
    assert len(state.jobs) == 1


def test_resuming_a_job_whose_failure_is_likely_to_recur_asks_first(box: Box, actions: Actions, person: Person) -> None:
    person.answer = False
    actions.resume(box.record_job("a", JobState.FAILED, error="rank 0: torch.OutOfMemoryError: CUDA out of memory"))
    ((question, yes),) = person.questions
    assert "Without a change it will probably fail again" in question
    assert yes == "Resume"


def test_an_edit_reports_its_effect(box: Box, state: State, actions: Actions, person: Person) -> None:
    job_id = box.record_job("a", JobState.FINISHED)
    box.data.run(job_id).create()
    actions.edit([job_id], lambda *where: edits.rename(*where, "b"))
    assert person.told == ['information: Job 1 is now called "b".']
    assert state.jobs[0].name == "b"


def test_only_jobs_seen_running_are_reported_as_ended_and_only_once(box: Box, state: State, actions: Actions) -> None:
    box.record_job("old", JobState.FINISHED)
    job_id = box.record_job("new", JobState.RUNNING)
    assert actions.newly_ended() == []
    control = Control(box.data.control_db)
    control.transition(job_id, JobState.FINISHED)
    control.close()
    assert [job.name for job in actions.newly_ended()] == ["new"]
    assert actions.newly_ended() == []
