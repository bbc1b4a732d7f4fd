"""Tests for the changes that users can make to a job."""

from __future__ import annotations

import pytest
from support.commands import command_file

from sae_tui.jobs import edits
from sae_tui.jobs.record import read_record
from trainer.contract.errors import UserError
from trainer.contract.store.states import JobState


def edit(box, what, job_id: int, *values: object) -> str:
    box.data.run(job_id).create()
    return what(box.data, box.control, job_id, *values)


def test_name_note_and_tags_are_stored_in_the_job_list_and_in_the_run_folder(box):
    job_id = box.record(state=JobState.FINISHED)
    assert edit(box, edits.rename, job_id, "  better ") == f'job {job_id} is now called "better"'
    assert edit(box, edits.write_note, job_id, "see the paper\nfig. 3") == f"job {job_id} has a new note"
    assert edit(box, edits.retag, job_id, ["#b", "a", "a"]) == f"job {job_id} has the tags a, b"
    assert edit(box, edits.retag, job_id, (), ["b", "c"]) == f"job {job_id} has the tag a"
    job = box.job(job_id)
    assert (job.name, job.note, job.tags) == ("better", "see the paper\nfig. 3", ("a",))
    assert read_record(box.data.run(job_id)) == job
    assert edit(box, edits.write_note, job_id, " ") == f"job {job_id} has no note"
    assert edit(box, edits.retag, job_id, (), ["a"]) == f"job {job_id} has no tags"


@pytest.mark.parametrize(
    ("what", "values", "said"),
    [
        (edits.rename, [" "], "a name must have 1 to 80 characters, not 0"),
        (edits.rename, ["x" * 81], "a name must have 1 to 80 characters, not 81"),
        (edits.retag, [["two words"]], 'a tag is one word of at most 40 characters, not "two words"'),
        (edits.retag, [["a,b"]], 'a tag is one word of at most 40 characters, not "a,b"'),
        (edits.retag, [["#"]], 'a tag is one word of at most 40 characters, not "#"'),
        (edits.retag, [["x" * 41]], "a tag is one word"),
        (edits.prioritise, [101], "a priority must be between -100 and 100, not 101"),
        (edits.prioritise, [-101], "a priority must be between -100 and 100, not -101"),
        (edits.come_after, [[1]], "job 1 cannot come after itself; choose another job"),
        (edits.come_after, [[9]], "there is no job 9; `sae-tui jobs` lists them"),
    ],
)
def test_an_invalid_edit_is_rejected_and_changes_nothing(box, what, values, said):
    job_id = box.record()
    before = box.job(job_id)
    with pytest.raises(UserError) as refused:
        edit(box, what, job_id, *values)
    assert str(refused.value).startswith(said)
    assert box.job(job_id) == before


@pytest.mark.parametrize(
    ("what", "state", "said"),
    [
        (edits.hold, JobState.RUNNING, "job 1 is running; `sae-tui pause 1` saves and pauses it"),
        (edits.hold, JobState.FINISHED, "job 1 has finished; only a queued job can be held"),
        (edits.release, JobState.RUNNING, "job 1 is running; it is not held"),
        (edits.release, JobState.FINISHED, "job 1 has finished; it is not held"),
        (edits.release, JobState.STOPPED, "job 1 was stopped; `sae-tui resume 1` resumes it"),
        (edits.come_after, JobState.RUNNING, "job 1 is running; only a queued job can wait for other jobs"),
        (edits.come_after, JobState.FAILED, "job 1 failed; only a queued job can wait for other jobs"),
    ],
)
def test_only_a_queued_job_can_be_held_released_or_made_dependent(box, what, state, said):
    job_id = box.record(state=state)
    with pytest.raises(UserError) as refused:
        edit(box, what, job_id, *([[]] if what is edits.come_after else []))
    assert str(refused.value) == said


def test_messages_about_a_command_that_has_started_promise_no_checkpoint(box):
    running, stopped = (
        box.record(state=state, config=command_file("sh")) for state in (JobState.RUNNING, JobState.STOPPED)
    )
    for what, job_id, said in (
        (edits.hold, running, f"job {running} is running; `sae-tui pause {running}` stops and pauses it"),
        (edits.release, stopped, f"job {stopped} was stopped; `sae-tui resume {stopped}` runs it again"),
    ):
        with pytest.raises(UserError) as refused:
            edit(box, what, job_id)
        assert str(refused.value) == said
    box.control.request(running, "stop")
    later = f"job {running} is being stopped; `sae-tui resume {running}` runs it again later"
    assert edits.pause(box.data, running) == later


def test_releasing_a_job_removes_the_hold_but_not_its_other_reasons_for_waiting(box):
    first, second = box.record(), box.record(gpus_wanted=1)
    edit(box, edits.come_after, second, [first])
    assert edit(box, edits.hold, second) == f"job {second} is held until it is released"
    message = f"job {second} is released; it comes after job {first}, which is queued"
    assert edit(box, edits.release, second) == message
    assert (box.job(second).held, box.job(second).after) == (False, (first,))
    assert edit(box, edits.release, second) == f"job {second} is not held; it comes after job {first}, which is queued"
    assert edit(box, edits.come_after, second, []) == f"job {second} no longer waits for other jobs"
    assert edit(box, edits.release, second) == f"job {second} is not held; it starts as soon as its GPUs are free"


def test_releasing_a_paused_job_names_the_checkpoint_it_resumes_from(box):
    job_id = box.record(attempt=1, step=520, held=True, gpus_wanted=1)
    (box.data.run(job_id).checkpoints / "step-00000501").mkdir(parents=True)
    assert edit(box, edits.hold, job_id) == f"job {job_id} is paused until it is released"
    assert edit(box, edits.release, job_id) == f"job {job_id} resumes from step 501 as soon as its GPUs are free"


@pytest.mark.parametrize("what", [edits.hold, edits.release])
def test_a_job_that_does_not_exist_cannot_be_edited(box, what):
    box.record()
    with pytest.raises(UserError, match="there is no job 5"):
        edit(box, what, 5)


def test_dependencies_between_jobs_cannot_form_a_cycle(box):
    first, second, third = (box.record() for _ in range(3))
    edit(box, edits.come_after, second, [first])
    edit(box, edits.come_after, third, [second, first, second])
    assert box.job(third).after == (second, first)
    with pytest.raises(UserError, match=f"^job {first} cannot come after job {third}: job {third} comes after"):
        edit(box, edits.come_after, first, [third])
    edit(box, edits.come_after, third, [second])
    chain = f"job {third} comes after job {second}, which comes after job {first}"
    with pytest.raises(UserError, match=f"^job {first} cannot come after job {third}: {chain}$"):
        edit(box, edits.come_after, first, [third])
    assert edit(box, edits.come_after, third, []) == f"job {third} no longer waits for other jobs"
    assert edit(box, edits.come_after, first, [third]) == f"job {first} comes after job {third}"


def test_a_job_can_depend_on_a_job_whose_own_dependency_was_deleted(box):
    first, second, third = (box.record() for _ in range(3))
    edit(box, edits.come_after, second, [first])
    box.control.transition(first, JobState.FINISHED)
    box.control.forget(first)
    edit(box, edits.come_after, third, [second])
    assert box.job(third).after == (second,)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (edits.stop, "job 1 stops; its complete shards are kept"),
        (edits.pause, "job 1 is paused, so that other jobs can use its GPUs; its complete shards are kept"),
        (edits.kill, "job 1 is killed within 5 s; its complete shards are kept"),
    ],
)
def test_messages_about_an_extraction_do_not_promise_a_checkpoint(box, what, said):
    job_id = box.record(state=JobState.RUNNING, config='kind = "extract"')
    box.data.run(job_id).create()
    assert what(box.data, job_id) == said


def test_only_a_running_training_job_can_finish_early(box):
    job_id = box.record()
    with pytest.raises(UserError, match=f"is queued; `sae-tui stop {job_id}` removes it from the queue"):
        edits.finish(box.data, job_id)
    for state in (JobState.STARTING, JobState.RUNNING):
        box.control.transition(job_id, state)
    assert "cools down for another 15%" in edits.finish(box.data, job_id)
    assert edits.finish(box.data, job_id) == f"job {job_id} is already cooling down"
    assert box.control.open_requests(job_id) == {"finish"}
    edits.stop(box.data, job_id)
    with pytest.raises(UserError, match=f"`sae-tui resume {job_id} --finish` finishes it later"):
        edits.finish(box.data, job_id)
    stopped = box.record(state=JobState.STOPPED, attempt=1)
    with pytest.raises(UserError, match=f"was stopped; `sae-tui resume {stopped} --finish` cools it down"):
        edits.finish(box.data, stopped)
    with pytest.raises(UserError, match="has already finished"):
        edits.finish(box.data, box.record(state=JobState.FINISHED))
    with pytest.raises(UserError, match="has no training to cool down"):
        edits.finish(box.data, box.record(state=JobState.RUNNING, config='kind = "extract"\n'))
