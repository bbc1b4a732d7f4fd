"""Tests for queued jobs whose supervisors are gone, for example after a machine restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sae_tui.jobs import edits, revive
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.user import user_name
from trainer.contract.errors import UserError
from trainer.contract.store.states import JobState

from .conftest import Box, start_fake

ENDLESS = "steps=100000"


def restart_of_the_machine(box) -> None:
    """End all processes for all jobs, and set the boot ids in the job rows to an earlier boot."""
    jobs = box.control.active_jobs()
    ranks = [rank.process for job in jobs for rank in box.control.ranks(job.id)]
    for process in (*(job.supervisor for job in jobs), *ranks):
        process.send(signal.SIGKILL)
        box.wait_for(lambda process=process: not process.is_alive(), "a process to be gone")
    for table in ("jobs", "ranks"):
        box.control._db.execute(f"UPDATE {table} SET boot_id = 'before-the-restart'")


def test_after_a_restart_the_queue_continues_in_the_same_order(box):
    runs = box.launch(ENDLESS)
    box.wait_steps(runs)
    after = box.launch("steps=1", place={"after": (runs,)})
    held = box.launch("steps=1", place={"hold": True})
    box.control.update(held, priority=7)
    before = {job_id: box.job(job_id).queued for job_id in (after, held)}
    restart_of_the_machine(box)
    assert reconcile(box.data) == [runs]
    assert (box.job(runs).state, box.job(runs).error) == (JobState.LOST, "the machine was restarted")
    assert revive.start_all(box.data, start_fake) == [held, after]
    assert revive.start_all(box.data, start_fake) == []
    waiting = f"comes after job {runs}, which was lost; resume job {runs}, or stop waiting for it: `sae-tui after"
    box.wait_for(lambda: box.job(after).waits_for.startswith(waiting), "the reason for waiting")
    assert [(box.job(job_id).state, box.job(job_id).queued) for job_id in before] == [
        (JobState.QUEUED, queued) for queued in before.values()
    ]
    assert (box.job(after).after, box.job(held).held) == ((runs,), True)
    box.resume(runs, f"train.n_steps={box.job(runs).step + 50}")
    assert box.wait_ended(after).state == JobState.FINISHED
    assert box.job(after).started >= box.job(runs).ended
    edits.release(box.data, box.control, held)
    assert box.wait_ended(held).state == JobState.FINISHED


def test_any_command_starts_a_missing_supervisor(box):
    job_id = box.launch("steps=1", place={"hold": True})
    supervisor = box.job(job_id).supervisor
    supervisor.send(signal.SIGKILL)
    box.wait_for(lambda: not supervisor.is_alive(), "the supervisor to be gone")
    command = [sys.executable, "-m", "sae_tui", "gpus", "--gpu-source=simulated", f"--data-dir={box.data.root}"]
    subprocess.run(command, check=True, capture_output=True)
    box.wait_for(lambda: box.job(job_id).supervisor != supervisor, "another supervisor")
    assert (box.job(job_id).state, box.job(job_id).held) == (JobState.QUEUED, True)
    edits.stop(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED


def waits_alone(box, **fields) -> int:
    """Record a queued job whose supervisor was ended by a reboot."""
    gone = {"boot_id": "before-the-restart", "supervisor_pid": 1, "supervisor_start": 1}
    job_id = box.record(**gone | fields)
    box.data.run(job_id).create()
    box.data.run(job_id).job_file.touch()
    return job_id


def test_only_the_owner_of_a_job_restarts_its_supervisor(box):
    theirs = waits_alone(box, user="somebody-else")
    started = []
    assert revive.start_all(box.data, lambda _, job_id: started.append(job_id)) == started == []
    assert reconcile(box.data) == []
    assert box.job(theirs).state == JobState.QUEUED


def test_a_supervisor_that_cannot_start_is_shown_as_the_reason_for_waiting(box, capfd):
    def fails(*_):
        raise UserError("no process can be made")

    job_id = waits_alone(box, user=user_name())
    assert revive.start_all(box.data, fails) == []
    assert box.job(job_id).waits_for == "its supervisor cannot be started again: no process can be made"
    assert box.job(job_id).state == JobState.QUEUED


def test_an_unwritable_log_affects_neither_commands_nor_other_jobs(box, monkeypatch, capfd):
    job_id = waits_alone(box, user=user_name())
    for log in (box.data.root / "revive.log", box.data.run(job_id).supervisor_log):
        log.mkdir(parents=True)
    monkeypatch.setattr(revive, "_again_at", 0.0)
    assert revive.reconcile_and_revive(box.data) == []
    assert revive.start_all(box.data) == []
    log = box.data.run(job_id).supervisor_log
    reason = f"its supervisor could not be started: {log} cannot be written: is a directory"
    assert box.job(job_id).waits_for.lower() == f"its supervisor cannot be started again: {reason}".lower()


RECONCILES_AS_NOBODY = """
import os, sys
from pathlib import Path
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.revive import revive
from trainer.contract.paths import DataDir
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print(reconcile(DataDir(Path(sys.argv[1])), revive))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_queued_job_whose_run_is_readable_only_by_its_owner_stays_queued():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        box = Box(Path(folder))
        job_id = waits_alone(box, user="somebody-else")
        for shared, mode in ((box.data.root, 0o777), (box.data.root / "runs", 0o755), (box.data.control_db, 0o666)):
            shared.chmod(mode)
        command = [sys.executable, "-c", RECONCILES_AS_NOBODY, str(box.data.root)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("[]\n", "")
        assert box.job(job_id).state == JobState.QUEUED
        box.control.close()


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_job_that_has_not_begun_stays_held_and_dependent_when_resumed(box, attempt):
    first = box.launch(ENDLESS)
    job_id = box.launch("steps=1", place={"after": (first,), "hold": True})
    box.job(job_id).supervisor.send(signal.SIGKILL)
    box.control.transition(job_id, JobState.LOST)
    box.control.update(job_id, attempt=attempt)
    box.wait_for(lambda: not box.job(job_id).supervisor.is_alive(), "the supervisor to be gone")
    plan = box.resume(job_id)
    job = box.job(job_id)
    if attempt:
        assert (job.held, job.after) == (False, ())
        assert plan.sentence == "starts from step 0, since it had saved no checkpoint"
        assert box.wait_ended(job_id).state == JobState.FINISHED
    else:
        assert (job.held, job.after) == (True, (first,))
        assert plan.sentence == f"is queued again; it comes after job {first} and is held until it is released"


def test_two_processes_do_not_start_the_same_supervisor(box):
    job_id = waits_alone(box, user=user_name())
    started = []

    def start(data, started_id):
        assert revive.start_all(data, lambda *_: os.abort()) == []
        started.append(started_id)

    assert revive.start_all(box.data, start) == started == [job_id]
