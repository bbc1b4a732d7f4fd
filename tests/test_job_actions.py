"""Actions on jobs, with a stand-in for the person who answers the app's questions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.box import Box

from sae_tui.job_actions import Also, JobActions
from sae_tui.jobs import edits
from sae_tui.jobs.view.reader import JobsReader, JobView
from sae_tui.settings import Settings
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState


class Person:
    """Answers every question, and records questions and messages."""

    def __init__(self) -> None:
        self.answer, self.takes_other = True, False
        self.questions: list[tuple[str, str]] = []
        self.told: list[str] = []

    def notify(self, message: str, *, severity: str) -> None:
        self.told.append(f"{severity}: {message}")

    def ask(self, question: str, yes: str, then: Callable[[], object], also: Also | None = None) -> None:
        self.questions.append((question, yes))
        if also and self.takes_other:
            also.act()
        elif self.answer:
            then()

    def do(self, act: Callable[[], str]) -> None:
        self.told.append(act())


class Known:
    """The jobs as the store has them now."""

    def __init__(self, box: Box) -> None:
        self.data, self.settings = box.data, Settings()
        self.readonly = False
        self.monitor = SimpleNamespace(latest=lambda: (), source_name="none", cuda=False)

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
def known(box: Box) -> Known:
    return Known(box)


@pytest.fixture
def actions(known: Known, person: Person) -> JobActions:
    return JobActions(known, person)


def test_a_missing_job_is_reported(box: Box, actions: JobActions, person: Person) -> None:
    box.record_job("a", JobState.FINISHED)
    actions.stop(7)
    assert person.told == ["warning: There is no job 7."]


def test_a_job_is_stopped_after_a_question_and_killed_after_a_second_one(
    box: Box, known: Known, actions: JobActions, person: Person
) -> None:
    job_id = box.record_job("a", JobState.RUNNING)
    person.answer = False
    actions.stop(job_id)
    assert person.questions == [("Stop job 1 (a)? It saves a checkpoint first.", "Stop")]
    assert not known.jobs[0].stop_requested
    person.answer = True
    actions.stop(job_id)
    assert known.jobs[0].stop_requested
    actions.stop(job_id)
    assert person.questions[-1][1] == "End it"
    assert person.told[-1] == "job 1 is ended within 5 s, saved or not"


def test_a_running_training_can_finish_early_instead_of_being_stopped(
    box: Box, known: Known, actions: JobActions, person: Person
) -> None:
    job_id = box.record_job("a", JobState.RUNNING, step=200, total_steps=2000)
    person.takes_other = True
    actions.stop(job_id)
    assert "it cools down over 30 steps" in person.questions[0][0]
    assert "ends as finished" in person.told[0]
    # Finishing early is not a stop, so the next request is a stop, not a kill.
    assert not known.jobs[0].stop_requested
    person.takes_other = False
    actions.stop(job_id)
    assert person.questions[-1][1] == "Stop"


def test_stopping_an_extraction_mentions_its_complete_shards(box: Box, actions: JobActions, person: Person) -> None:
    job_id = box.record_job("a", JobState.RUNNING, config='kind = "extract"\n')
    actions.stop(job_id)
    actions.stop(job_id)
    assert person.questions == [
        ("Stop job 1 (a)? It keeps its complete shards.", "Stop"),
        ("Job 1 (a) is stopping. End it at once? Rows after its last shard are lost.", "End it"),
    ]


@pytest.mark.parametrize("act", ["stop", "pause"])
def test_acting_on_an_ended_job_reports_how_it_ended(act: str, box: Box, actions: JobActions, person: Person) -> None:
    getattr(actions, act)(box.record_job("a", JobState.FINISHED))
    assert (person.told, person.questions) == (["warning: Job 1 has finished."], [])


def test_deleted_jobs_can_be_restored_in_reverse_order(
    box: Box, known: Known, actions: JobActions, person: Person
) -> None:
    ids = [box.record_job(name, JobState.FINISHED) for name in "abc"]
    for job_id in ids:
        box.data.run(job_id).create()
    actions.delete(ids[:2])
    actions.delete(ids[2:])
    assert known.jobs == ()
    actions.undo_delete()
    assert [job.name for job in known.jobs] == ["c"]
    actions.undo_delete()
    assert sorted(job.name for job in known.jobs) == ["a", "b", "c"]
    actions.undo_delete()
    assert person.told[-1] == "warning: No job was deleted since the app started."


def test_a_running_job_is_not_deleted(box: Box, known: Known, actions: JobActions, person: Person) -> None:
    actions.delete([box.record_job("a", JobState.RUNNING)])
    assert (person.told, person.questions) == (["warning: Job 1 is running; stop it first."], [])
    assert len(known.jobs) == 1


def test_resuming_after_a_failure_likely_to_recur_asks_first(box: Box, actions: JobActions, person: Person) -> None:
    person.answer = False
    actions.resume(box.record_job("a", JobState.FAILED, error="rank 0: torch.OutOfMemoryError: CUDA out of memory"))
    ((question, yes),) = person.questions
    assert "Without a change it will probably fail again" in question
    assert yes == "Resume"


def test_an_edit_reports_its_effect(box: Box, known: Known, actions: JobActions, person: Person) -> None:
    job_id = box.record_job("a", JobState.FINISHED)
    box.data.run(job_id).create()
    actions.edit([job_id], lambda *where: edits.rename(*where, "b"))
    assert person.told == ['job 1 is called "b"']
    assert known.jobs[0].name == "b"


def test_only_jobs_seen_running_are_reported_as_newly_ended_and_only_once(
    box: Box, known: Known, actions: JobActions
) -> None:
    box.record_job("old", JobState.FINISHED)
    job_id = box.record_job("new", JobState.RUNNING)
    assert actions.newly_ended() == []
    control = Control(box.data.control_db)
    control.transition(job_id, JobState.FINISHED)
    control.close()
    assert [job.name for job in actions.newly_ended()] == ["new"]
    assert actions.newly_ended() == []
