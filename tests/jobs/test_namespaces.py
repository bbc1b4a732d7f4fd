"""Tests for access to jobs and the trash from another PID namespace, such as a container with the host's name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sae_tui.jobs import edits
from sae_tui.jobs.upkeep import trash
from trainer.contract.store.states import JobState

ROOT = Path(__file__).parents[2]
AS_ROOT = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
ELSEWHERE = ["unshare", *AS_ROOT, "--pid", "--fork", "--mount-proc"]
LOOKS = """
import sys
from pathlib import Path
from sae_tui.jobs.upkeep import trash
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.upkeep.repair import repair
from trainer.contract.paths import DataDir
data = DataDir(Path(sys.argv[1]))
print(reconcile(data), trash.empty(data), list(repair(data)))
"""


def may_unshare() -> bool:
    try:
        return subprocess.run([*ELSEWHERE, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not may_unshare(), reason="this process cannot create PID namespaces")


def seen_elsewhere(box) -> str:
    """Reconcile jobs, empty the trash and run a repair in another PID namespace; return the results."""
    command = [*ELSEWHERE, sys.executable, "-c", LOOKS, str(box.data.root)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_jobs_alive_in_another_pid_namespace_are_kept_and_dead_ones_are_lost(box):
    runs, waits = box.launch("steps=100000", gpus=(0,)), box.launch("steps=1", gpus=(0,))
    box.wait_steps(runs)
    assert seen_elsewhere(box) == "[] 0 []"
    assert (box.job(runs).state, box.job(waits).state) == (JobState.RUNNING, JobState.QUEUED)
    assert [lease.job_id for lease in box.control.leases()] == [runs]
    assert box.messages(runs, "orphaned") == []
    edits.hold(box.data, box.control, waits)
    box.job(runs).supervisor.send(signal.SIGKILL)
    box.wait_for(lambda: seen_elsewhere(box).startswith(f"[{runs}]"), "the dead job to be lost")
    assert (box.job(waits).state, box.job(runs).state) == (JobState.QUEUED, JobState.LOST)
    edits.stop(box.data, waits)
    assert box.wait_ended(waits).state == JobState.STOPPED


def test_an_open_apps_trash_is_not_emptied_from_another_pid_namespace(box):
    job_id = box.record(state=JobState.FINISHED)
    box.data.run(job_id).create()
    trash.throw_away(box.data, job_id)
    assert seen_elsewhere(box) == "[] 0 []"
    assert trash.put_back(box.data, job_id) == f"job {job_id} (job) is restored"
