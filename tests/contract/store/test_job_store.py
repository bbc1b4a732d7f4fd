"""Tests for the control store, which holds jobs, exclusive GPU leases, ranks, requests and events."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trainer.contract.errors import UserError
from trainer.contract.process import ProcessRef
from trainer.contract.store.database import StoreError
from trainer.contract.store.job_store import Control, LeaseConflict
from trainer.contract.store.rows import Event, Job, Rank
from trainer.contract.store.states import ACTIVE, JobState

MakeJob = Callable[..., Job]
GPUS = [(index, f"GPU-{index}") for index in range(4)]


def recorded(control: Control, job: Job) -> Job:
    return control.job(control.create_job(job))


def test_a_new_job_is_queued_and_has_no_supervisor(control: Control, queued: MakeJob) -> None:
    before = time.time()
    job = recorded(control, queued())
    assert job.state is JobState.QUEUED
    assert before <= job.created <= time.time()
    assert job.supervisor is None
    assert (job.gpu_ids, job.started, job.ended, job.loss) == ((), None, None, None)


def test_jobs_are_listed_newest_first_and_filtered_by_state(control: Control, queued: MakeJob) -> None:
    ids = [control.create_job(queued(state=state)) for state in ("queued", "running", "failed")]
    assert [job.id for job in control.jobs()] == ids[::-1]
    assert [job.id for job in control.jobs(iter([JobState.FAILED, JobState.QUEUED]))] == [ids[2], ids[0]]
    assert [job.id for job in control.active_jobs()] == [ids[1], ids[0]]
    assert control.jobs([]) == []


def test_a_copy_of_a_job_replaces_the_previous_copy_and_takes_no_gpus(control: Control, queued: MakeJob) -> None:
    job = msgspec.structs.replace(queued(), id=7, state=JobState.RUNNING, gpu_ids=(0,), gpu_uuids=("GPU-1",))
    rank = Rank(job_id=7, attempt=1, rank=0, pid=2, start_ticks=3, boot_id="boot")
    event = Event(timestamp=5.0, level="info", kind="running", message="is running")
    control.copy(job, [rank], ["stop"], [event])
    ended = msgspec.structs.replace(job, state=JobState.FINISHED)
    control.copy(ended, [rank], [], [msgspec.structs.replace(event, kind="finished")])
    assert control.jobs() == [ended]
    assert control.ranks(7) == [rank]
    assert (control.leases(), control.open_requests(7)) == ([], set())
    assert [(one.kind, one.timestamp) for one in control.events(7)] == [("running", 5.0), ("finished", 5.0)]


def test_reading_a_job_that_does_not_exist_raises_an_error(control: Control) -> None:
    with pytest.raises(UserError, match=r"^there is no job 7; `sae-tui jobs` lists them$"):
        control.job(7)
    assert control.transition(7, JobState.FAILED) is False


def test_writing_progress_does_not_change_the_state_of_a_job(control: Control, queued: MakeJob) -> None:
    job_id = control.create_job(queued(state=JobState.RUNNING))
    control.update(job_id, step=5, loss=float("nan"), gpu_ids=[1, 2])
    job = control.job(job_id)
    assert (job.state, job.step, job.loss, job.gpu_ids) == (JobState.RUNNING, 5, None, (1, 2))


@pytest.mark.parametrize("fields", [{"state": "finished"}, {"stepp": 1}])
def test_an_update_cannot_bypass_the_state_transitions(control: Control, queued: MakeJob, fields: Any) -> None:
    job_id = control.create_job(queued())
    with pytest.raises(AssertionError):
        control.update(job_id, **fields)
    assert control.job(job_id).state is JobState.QUEUED


def test_leasing_gpus_and_changing_the_state_to_starting_is_one_transaction(control: Control, queued: MakeJob) -> None:
    job = recorded(control, queued())
    assert control.lease(job, GPUS[:2], supervisor_pid=9, gpu_ids=(0, 1))
    started = control.job(job.id)
    assert (started.state, started.supervisor_pid, started.gpu_ids) == (JobState.STARTING, 9, (0, 1))
    assert [(lease.gpu_index, lease.gpu_uuid, lease.job_id, lease.user) for lease in control.leases()] == [
        (0, "GPU-0", job.id, "ada"),
        (1, "GPU-1", job.id, "ada"),
    ]


def test_a_refused_lease_changes_nothing(control: Control, queued: MakeJob) -> None:
    first, second = (recorded(control, queued(user=user)) for user in ("ada", "bob"))
    control.lease(first, GPUS[1:2])
    with pytest.raises(LeaseConflict, match=rf"^GPU 1 is held by job {first.id} \(ada\)$"):
        control.lease(second, GPUS[:2])
    assert [lease.job_id for lease in control.leases()] == [first.id]
    assert control.job(second.id) == second


def test_jobs_share_a_gpu_as_long_as_its_memory_suffices_for_all(control: Control, queued: MakeJob) -> None:
    share = {"shares_gpus": True, "card_memory_bytes": 4 * 2**30}
    space = {"GPU-0": 10 * 2**30}
    first, second, third = (recorded(control, queued(**share)) for _ in range(3))
    for job in (first, second):
        assert control.lease(job, GPUS[:1], space)
    with pytest.raises(LeaseConflict, match=r"^GPU 0 has too little memory for all jobs that share it$"):
        control.lease(third, GPUS[:1], space)
    with pytest.raises(LeaseConflict, match="is held by job"):
        control.lease(recorded(control, queued()), GPUS[:1], space)
    assert [lease.job_id for lease in control.leases()] == [first.id, second.id]
    control.transition(first.id, JobState.STOPPED)
    assert control.lease(third, GPUS[:1], space)


def test_a_job_stopped_in_the_queue_leases_no_gpu(control: Control, queued: MakeJob) -> None:
    job = recorded(control, queued())
    control.transition(job.id, JobState.STOPPED)
    assert control.lease(job, GPUS) is False
    assert control.leases() == []


def test_the_same_gpu_index_on_another_host_refers_to_a_different_gpu(control: Control, queued: MakeJob) -> None:
    for host in ("a", "b"):
        assert control.lease(recorded(control, queued(host=host)), GPUS[:1])
    assert [lease.host for lease in control.leases()] == ["a", "b"]


# An imported SAE is recorded as "imported" from the start, so no job changes to that state.
@pytest.mark.parametrize("end", [state for state in JobState if state.is_final and state != JobState.IMPORTED])
def test_the_end_of_a_job_frees_only_its_own_gpus(control: Control, queued: MakeJob, end: JobState) -> None:
    ending, going_on = (recorded(control, queued()) for _ in range(2))
    control.lease(ending, GPUS[:2])
    control.lease(going_on, GPUS[2:])
    assert control.transition(ending.id, end, ended=5.0, error="why")
    assert {lease.job_id for lease in control.leases()} == {going_on.id}
    assert (control.job(ending.id).ended, control.job(ending.id).error) == (5.0, "why")


def test_a_transition_to_an_active_state_keeps_the_gpus(control: Control, queued: MakeJob) -> None:
    job = recorded(control, queued())
    control.lease(job, GPUS)
    for state in (JobState.RUNNING, JobState.STALLED, JobState.RUNNING, JobState.STOPPING):
        assert control.transition(job.id, state)
        assert len(control.leases()) == 4
        assert control.job(job.id).ended is None


LEASES_WHEN_TOLD = """
import json, sys
from pathlib import Path
from trainer.contract.store.job_store import Control, LeaseConflict
control = Control(Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    job_id, gpus = json.loads(line)
    try:
        print(control.lease(control.job(job_id), gpus), flush=True)
    except LeaseConflict:
        print("conflict", flush=True)
"""


def test_no_two_of_eight_racing_processes_lease_the_same_gpu(
    control: Control, queued: MakeJob, child: Callable[..., Any]
) -> None:
    racers = [child(LEASES_WHEN_TOLD, control.path) for _ in range(8)]
    assert [racer.hear() for racer in racers] == ["ready"] * 8
    for turn in range(12):
        jobs = [recorded(control, queued()) for _ in racers]
        requests = [[GPUS[(number + turn) % 4], GPUS[(number * turn + 1) % 4]] for number in range(8)]
        for racer, job, request in zip(racers, jobs, requests, strict=True):
            racer.tell(json.dumps([job.id, request]))
        answers = [racer.hear() for racer in racers]
        assert set(answers) <= {"True", "conflict"}
        won = {
            job.id: set(request)
            for job, request, answer in zip(jobs, requests, answers, strict=True)
            if answer == "True"
        }
        held = [gpu for gpus in won.values() for gpu in gpus]
        assert won
        assert len(held) == len(set(held))
        stored = [(lease.job_id, lease.gpu_uuid) for lease in control.leases()]
        assert sorted(stored) == sorted((job_id, uuid) for job_id, gpus in won.items() for _, uuid in gpus)
        for job in jobs:
            assert (control.job(job.id).state is JobState.STARTING) == (job.id in won)
            control.transition(job.id, JobState.FAILED)
        assert control.leases() == []


MOVES_WHEN_TOLD = """
import sys
from pathlib import Path
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState
control = Control(Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    job_id, state = line.split()
    print(control.transition(int(job_id), JobState(state), error=state), flush=True)
"""


def test_only_one_of_several_racing_processes_ends_a_job(
    control: Control, queued: MakeJob, child: Callable[..., Any]
) -> None:
    movers = [child(MOVES_WHEN_TOLD, control.path) for _ in range(3)]
    assert [mover.hear() for mover in movers] == ["ready"] * 3
    ends = ["stopped", "failed", "lost"]
    for _ in range(10):
        job_id = control.create_job(queued(state=JobState.RUNNING))
        for mover, end in zip(movers, ends, strict=True):
            mover.tell(f"{job_id} {end}")
        made = [end for mover, end in zip(movers, ends, strict=True) if mover.hear() == "True"]
        job = control.job(job_id)
        assert made == [job.state]
        assert job.error == job.state


def test_ranks_are_recorded_when_started_and_when_ended(control: Control) -> None:
    started = [
        Rank(job_id=1, attempt=attempt, rank=rank, pid=10 * attempt + rank, start_ticks=5, boot_id="b")
        for attempt, rank in [(1, 0), (0, 1), (0, 0)]
    ]
    for rank in started:
        control.record_rank(rank)
    assert control.ranks(1) == started[::-1]
    ended = msgspec.structs.replace(started[2], exit_signal=9, ended=2.5, error="killed")
    control.record_rank(ended)
    assert control.ranks(1) == [ended, started[1], started[0]]
    assert control.ranks(2) == []
    assert ended.process == ProcessRef(0, 5, "b")


def test_a_request_is_visible_to_another_connection(control: Control) -> None:
    with contextlib.closing(Control(control.path, readonly=True)) as reader:
        assert reader.open_requests(1) == set()
        before = reader.version()
        for kind in ("stop", "stop", "kill"):
            control.request(1, kind)  # type: ignore[arg-type]
        assert reader.open_requests(1) == {"stop", "kill"}
        assert reader.open_requests(2) == set()
        assert reader.version() != before


def test_events_are_stored_in_order(control: Control) -> None:
    control.add_event(1, "start", "begun")
    control.add_event(2, "start", "of another job")
    control.add_event(1, "rank", "rank 1 died", level="error")
    assert [(event.kind, event.message, event.level) for event in control.events(1)] == [
        ("start", "begun", "info"),
        ("rank", "rank 1 died", "error"),
    ]
    assert control.events(1)[0].timestamp <= control.events(1)[1].timestamp


def test_a_state_is_active_if_it_is_not_final() -> None:
    assert {"queued", "starting", "running", "stalled", "stopping"} == {str(state) for state in ACTIVE}


@pytest.mark.parametrize("readonly", [False, True])
def test_a_store_works_again_once_its_moved_folder_is_moved_back(
    tmp_path: Path, queued: MakeJob, readonly: bool
) -> None:
    folder, aside = tmp_path / "data", tmp_path / "aside"
    folder.mkdir()
    with contextlib.closing(Control(folder / "control.db")) as writer:
        job_id = writer.create_job(queued())
    with contextlib.closing(Control(folder / "control.db", readonly=readonly)) as control:
        folder.rename(aside)
        for _ in range(2):
            with pytest.raises(StoreError, match=r"cannot be opened|there is no store"):
                control.job(job_id)
        aside.rename(folder)
        assert control.job(job_id).id == job_id


def test_changes_made_together_are_stored_together(control: Control, queued: MakeJob) -> None:
    other = Control(control.path, readonly=True)
    with control.together():
        ids = [control.create_job(queued()) for _ in range(3)]
        control.update(ids[0], note="first")
        assert other.jobs() == []
    assert [job.id for job in other.jobs()] == ids[::-1]
    other.close()


def half_change(control: Control, job_id: int) -> None:
    """Make two changes together, then fail."""
    with control.together():
        control.update(job_id, note="lost")
        control.add_event(job_id, "lost", "lost")
        raise UserError("stop")


def test_changes_made_together_inside_a_larger_group_are_undone_together(control: Control, queued: MakeJob) -> None:
    with control.together():
        job_id = control.create_job(queued())
        with pytest.raises(UserError):
            half_change(control, job_id)
        control.update(job_id, priority=3)
    (job,) = control.jobs()
    assert (job.note, job.priority, control.events(job_id)) == ("", 3, [])


def test_only_the_change_that_fails_is_undone(control: Control, queued: MakeJob) -> None:
    def fails(row: Job) -> Job:
        raise UserError("its files cannot be written")

    with control.together():
        first = control.create_job(queued())
        with pytest.raises(UserError):
            control.create_job(queued(), prepare=fails)
        second = control.create_job(queued())
    assert [job.id for job in control.jobs()] == [second, first]
    assert second == first + 1


def test_an_error_undoes_all_changes_made_together(control: Control, queued: MakeJob) -> None:
    job_id = control.create_job(queued())
    with pytest.raises(UserError):
        half_change(control, job_id)
    assert (control.job(job_id).note, control.events(job_id)) == ("", [])
    control.update(job_id, note="kept")
    assert control.job(job_id).note == "kept"
