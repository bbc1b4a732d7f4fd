"""Tests for jobs waiting for the same GPU: races, order, and supervisors that do not respond."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest

from sae_tui.jobs.gpus.locks import GpuLocks
from sae_tui.jobs.queue import plan, waiting_job
from sae_tui.jobs.queue.waiting_job import QueueEntry
from trainer.contract.process import ProcessRef, state_of
from trainer.contract.store.database import StoreError
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

ROUNDS = 25
RACERS = 4


def queued(box, **fields) -> int:
    me = ProcessRef.current()
    identity = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}
    fields = {"gpu_ids": (0,), "gpu_uuids": ("GPU-0",)} | identity | fields
    return box.record(**fields, gpus_wanted=len(fields["gpu_uuids"]))


def line(box, job_id: int) -> QueueEntry:
    control = Control(box.data.control_db)
    return QueueEntry(box.data, control, control.job(job_id))


def test_exactly_one_of_several_racing_launchers_gets_the_gpu_in_every_round(box):
    for _ in range(ROUNDS):
        entries = [line(box, queued(box, supervisor_pid=None)) for _ in range(RACERS)]
        together = threading.Barrier(RACERS)
        won: list[int] = []

        def race(number: int, entries=entries, together=together, won=won) -> None:
            together.wait()
            if entries[number].try_start():
                won.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert len(box.control.leases()) == 1
        for entry in entries:
            entry.locks.release()
        for job in box.control.active_jobs():
            box.control.transition(job.id, JobState.STOPPED)


def test_jobs_waiting_for_the_same_gpu_start_in_launch_order(box):
    first, second = queued(box), queued(box)
    assert not line(box, second).try_start()
    assert box.control.events(second)[0].message == f"waits: job {first} is ahead in the queue"
    assert line(box, first).try_start()


def test_an_older_job_waiting_for_another_gpu_does_not_block_a_younger_job(box):
    running = queued(box, gpu_ids=(1,), gpu_uuids=("GPU-1",))
    entry = line(box, running)
    assert entry.try_start()
    older = queued(box, gpu_ids=(0, 1), gpu_uuids=("GPU-0", "GPU-1"))
    younger = queued(box)
    assert not line(box, older).try_start()
    assert line(box, younger).try_start()
    entry.locks.release()


@pytest.fixture
def halted(monkeypatch):
    """Start a process that stands in for a supervisor, and halt it with SIGSTOP."""
    monkeypatch.setattr(plan, "SILENT_AFTER_S", 0.0)
    monkeypatch.setattr(waiting_job, "PAUSE_EACH_S", 0.0)
    supervisor = subprocess.Popen(["sleep", "60"])
    supervisor.send_signal(signal.SIGSTOP)
    yield ProcessRef.of(supervisor.pid)
    supervisor.kill()
    supervisor.wait()


def test_a_job_loses_its_turn_while_its_supervisor_is_halted(box, halted, monkeypatch):
    first = queued(box, supervisor_pid=halted.pid, supervisor_start=halted.start_ticks, priority=3)
    second, third = (line(box, queued(box)) for _ in range(2))
    assert not second.try_start()
    assert box.job(first).waits_for == f"its supervisor (pid {halted.pid}) does not respond; other jobs go first"
    assert [(event.kind, event.level) for event in box.control.events(first)] == [("silent", "warning")]
    assert second.try_start()
    assert not third.try_start()
    assert len(box.control.events(first)) == 1
    # When the supervisor continues, it finds the GPU leased, and its job is first in the queue again.
    assert not line(box, first).try_start()
    assert "GPU 0 is held by job" in box.job(first).waits_for
    second.locks.release()
    box.control.transition(second.job.id, JobState.FINISHED)
    monkeypatch.setattr(plan, "SILENT_AFTER_S", 30.0)
    assert not third.try_start()
    assert box.job(third.job.id).waits_for == f"job {first} is ahead in the queue"


def test_a_job_that_cannot_reserve_its_gpu_is_skipped_but_not_reported_as_silent(box, halted):
    first = queued(box, supervisor_pid=halted.pid, supervisor_start=halted.start_ticks, waits_for="its own reason")
    sign = box.data.run(first).lock_file
    sign.parent.mkdir(parents=True)
    sign.touch()
    second = line(box, queued(box))
    assert not second.try_start()
    assert (box.job(first).waits_for, box.control.events(first)) == ("its own reason", [])
    # Make the last heartbeat old, as it becomes when a supervisor is halted.
    os.utime(sign, (1, 1))
    assert second.try_start()
    assert [event.kind for event in box.control.events(first)] == ["silent"]


def test_a_job_overtaking_a_halted_supervisor_reports_it_despite_a_recent_heartbeat(box, halted):
    first = queued(box, supervisor_pid=halted.pid, supervisor_start=halted.start_ticks, waits_for="its own reason")
    sign = box.data.run(first).lock_file
    sign.parent.mkdir(parents=True)
    sign.touch()
    second = line(box, queued(box))
    assert [second.try_start(), second.try_start()] == [False, True]
    assert box.job(first).waits_for == f"its supervisor (pid {halted.pid}) does not respond; other jobs go first"
    assert [event.kind for event in box.control.events(first)] == ["silent"]
    second.locks.release()


def test_a_started_job_reports_a_hanging_supervisor_once_its_last_heartbeat_is_old(box, halted):
    first = queued(box, supervisor_pid=halted.pid, supervisor_start=halted.start_ticks)
    sign = box.data.run(first).lock_file
    sign.parent.mkdir(parents=True)
    sign.touch()
    assert halted.send(signal.SIGCONT)
    box.wait_for(lambda: state_of(halted.pid) == "S", "the wait")
    second = line(box, queued(box))
    assert [second.try_start(), second.try_start()] == [False, True]
    second.report_silent()
    assert box.control.events(first) == []
    os.utime(sign, (1, 1))
    for _ in range(2):
        second.report_silent()
    assert box.job(first).waits_for == f"its supervisor (pid {halted.pid}) does not respond; other jobs go first"
    assert [event.kind for event in box.control.events(first)] == ["silent"]
    second.locks.release()


def test_a_reason_for_waiting_is_logged_once(box):
    first, second = queued(box), queued(box)
    entry = line(box, second)
    assert [entry.try_start() for _ in range(3)] == [False] * 3
    assert len(box.control.events(second)) == 1
    assert box.job(first).state == JobState.QUEUED


def test_a_new_process_of_the_same_user_is_not_logged_as_a_new_event(box, monkeypatch):
    job_id = queued(box)
    entry = line(box, job_id)
    for number in range(20):
        user = "alice" if number % 3 else "bob"
        reason = f"GPU 0 is used by {user} (pid {number}, python sweep_{'abcdefghij'[number % 10]}.py --lr (1))"
        monkeypatch.setattr(entry, "_try_take_gpus", lambda reason=reason: reason)
        assert not entry.try_start()
        assert box.job(job_id).waits_for == reason
    reasons = [event.message for event in box.control.events(job_id) if event.kind == "waiting"]
    assert [message.split(" (")[0] for message in reasons] == [
        "waits: GPU 0 is used by bob", "waits: GPU 0 is used by alice",
    ]  # fmt: skip


def test_other_users_short_processes_do_not_flood_a_queued_jobs_events(box, monkeypatch):
    job_id = queued(box)
    entry = line(box, job_id)
    commands = [f"train --name {'abcdefgh'[number % 8]}" for number in range(50)]
    reasons = [f"GPU 0 is used by ada (pid {number}, {command})" for number, command in enumerate(commands)]
    reasons += [f"GPU 0 is used by ada (pid 1, f{'(' * number})" for number in range(50)]
    answers = iter(reasons)
    monkeypatch.setattr(entry, "_try_take_gpus", lambda: next(answers))
    assert not any(entry.try_start() for _ in reasons)
    assert len(box.control.events(job_id)) <= 3
    assert box.job(job_id).waits_for == reasons[-1]


def test_a_job_that_is_no_longer_queued_does_not_start_and_holds_no_lock(box):
    job_id = queued(box)
    entry = line(box, job_id)
    box.control.transition(job_id, JobState.LOST)
    assert not entry.try_start()
    assert GpuLocks(box.data.locks, ["GPU-0"]).take()


def test_a_job_delayed_by_a_locked_store_keeps_its_place_in_the_queue(box, locked_store):
    job_id = queued(box)
    entry = line(box, job_id)
    with locked_store(box.data.control_db), pytest.raises(StoreError, match="has been locked"):
        entry.try_start()
    assert entry.locks.descriptors == ()
    assert entry.try_start()
    assert box.job(job_id).state == JobState.STARTING


def test_a_job_keeps_the_locks_it_already_holds(box):
    box.data.create()
    locks = GpuLocks(box.data.locks, ["GPU-0"])
    assert locks.take()
    held = locks.descriptors
    assert locks.take()
    assert locks.descriptors == held


def test_a_started_job_knows_its_new_state_without_reading_its_row_again(box):
    job_id = queued(box)
    entry = line(box, job_id)
    assert entry.try_start()
    assert entry.job == box.job(job_id)
    assert (entry.job.state, entry.job.attempt) == (JobState.STARTING, 1)
