"""Tests for queued jobs whose supervisors are gone, for example after a machine restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sae_tui.jobs import revive
from sae_tui.jobs.user import user_name
from trainer.contract.store.states import JobState

from .conftest import Box

ENDLESS = "steps=100000"


def waits_alone(box, **fields) -> int:
    """Record a queued job whose supervisor was killed by a reboot."""
    gone = {"boot_id": "before-the-restart", "supervisor_pid": 1, "supervisor_start": 1}
    job_id = box.record(**gone | fields)
    box.data.run(job_id).create()
    box.data.run(job_id).job_file.touch()
    return job_id


def test_an_unwritable_queue_log_does_not_affect_commands(box, monkeypatch):
    job_id = waits_alone(box, user=user_name())
    (box.data.root / "queue.log").mkdir(parents=True)
    monkeypatch.setattr(revive, "_again_at", 0.0)
    assert revive.reconcile_and_revive(box.data) == []
    assert box.job(job_id).state == JobState.QUEUED


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
        assert plan.sentence == "starts from step 0, because it has not saved a checkpoint"
        assert box.wait_ended(job_id).state == JobState.FINISHED
    else:
        assert (job.held, job.after) == (True, (first,))
        assert plan.sentence == f"is queued again; it comes after job {first} and is held until it is released"
