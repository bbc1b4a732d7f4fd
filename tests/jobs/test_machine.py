"""Tests for jobs on a renamed machine, and on other machines that share the data folder."""

from __future__ import annotations

import os
import socket
import time

import pytest
from support.commands import command_file

from sae_tui.cli_commands.jobs import json_fields
from sae_tui.hosts.protocol import far_job
from sae_tui.jobs import edits, machine
from sae_tui.jobs.mending import end_jobs_elsewhere
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.supervisor.sign import Sign
from sae_tui.jobs.upkeep import trash
from sae_tui.jobs.upkeep.repair import repair
from sae_tui.jobs.view.find import waits
from sae_tui.jobs.view.reader import JobReader, JobsReader
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.process import boot_id
from trainer.contract.runs.lock import RunLock
from trainer.contract.store.states import JobState

AWAY = {"host": "gpu7", "boot_id": "another-boot", "supervisor_pid": 1, "supervisor_start": 1}
GONE = r"its host gpu7 has been silent for .*; if gpu7 is gone, `sae-tui repair --host gpu7` ends the job"


@pytest.fixture
def on_network(monkeypatch):
    """Pretend that the data folder is on a network file system."""
    monkeypatch.setattr(machine, "network_file_system", lambda _: "NFS")


def away(box, silent_s: float = 3600.0, **fields) -> int:
    """Record a job on another host that was last active `silent_s` seconds ago."""
    job_id = box.record(**AWAY | fields)
    paths = box.data.run(job_id)
    paths.create()
    paths.lock_file.touch()
    heard = time.time() - silent_s
    os.utime(paths.lock_file, (heard, heard))
    return job_id


def test_a_job_from_this_boot_is_on_this_machine_under_any_host_name(box):
    gone = {"supervisor_pid": os.getpid(), "supervisor_start": 1, "boot_id": boot_id()}
    job_id = box.record(host="its-name-before", state=JobState.RUNNING, **gone)
    box.data.run(job_id).create()
    assert reconcile(box.data) == [job_id]
    assert box.job(job_id).state == JobState.LOST


@pytest.mark.parametrize(("theirs", "is_ours"), [("another", False), ("mine", True), (None, True)])
def test_after_a_restart_the_host_name_identifies_a_machine_unless_its_id_differs(box, monkeypatch, theirs, is_ours):
    monkeypatch.setattr(machine, "machine_id", lambda: "mine")
    job = box.job(box.record(host=socket.gethostname(), boot_id="another-boot", machine_id=theirs))
    assert machine.is_here(job) == is_ours


def test_machines_created_from_the_same_image_are_distinguished(box, monkeypatch):
    monkeypatch.setattr(machine, "machine_id", lambda: "of-the-image")
    job_id = box.record(state=JobState.RUNNING, machine_id="of-the-image", **AWAY)
    assert reconcile(box.data) == []
    assert box.job(job_id).state == JobState.RUNNING


def test_requests_to_a_job_on_a_silent_host_are_rejected(box):
    job_id = away(box, state=JobState.RUNNING)
    for act in (edits.stop, edits.kill, edits.pause, edits.finish):
        with pytest.raises(UserError, match=f"job {job_id} is on another host, so nothing was done: {GONE}"):
            act(box.data, job_id)
    with pytest.raises(UserError, match=f"job {job_id} is running; {GONE}"):
        trash.refuse_unless_ended(box.data, job_id)
    with pytest.raises(UserError, match=f"job {job_id} is running; {GONE}"):
        box.resume(job_id)
    held = away(box, held=True)
    with pytest.raises(UserError, match=GONE):
        edits.release(box.data, box.control, held)
    assert box.control.open_requests(job_id) == box.control.open_requests(held) == set()
    assert box.job(held).held


def test_lists_show_a_silent_host_and_no_remaining_time(box, on_network):
    going = {"state": JobState.RUNNING, "step": 10, "total_steps": 20, "tokens": 100, "tokens_per_s": 1.0}
    job_id, heard = away(box, **going), away(box, silent_s=5, **going)
    reader = JobsReader(box.data)
    reader.poll()
    views = {view.id: view for view in reader.jobs}
    assert waits(views[job_id]).startswith("its host gpu7 has been silent for 1 h 00 min; if gpu7 is gone")
    assert waits(views[heard]) == ""
    assert views[job_id].eta_s is None
    # JSON output and the app on another host show the same information.
    assert [json_fields(views[one])["silent"] for one in (job_id, heard)] == [waits(views[job_id]), None]
    assert waits(far_job(views[job_id])) == waits(views[job_id])
    one = JobReader(box.data, job_id)
    one.poll()
    assert one.view.silent == views[job_id].silent
    reader.close()
    one.close()


def test_a_request_to_a_job_on_a_live_host_is_recorded_and_names_the_host(box, on_network):
    job_id = away(box, silent_s=5, state=JobState.RUNNING)
    message = edits.stop(box.data, job_id)
    assert message.startswith(
        f"job {job_id} saves a checkpoint and stops at its next step, once gpu7 reads the request"
    )
    assert box.control.open_requests(job_id) == {"stop"}
    assert list(end_jobs_elsewhere(box.data, "gpu7")) == [
        f"job {job_id} is unchanged: its host gpu7 was active 5 s ago; stop it instead"
    ]


def test_repair_lists_silent_hosts_and_ends_the_jobs_of_the_given_host(box, on_network):
    job_id = away(box, state=JobState.RUNNING, gpu_ids=(0,), gpu_uuids=("GPU-7",))
    command = away(box, state=JobState.RUNNING, config=command_file("sh"))
    other = away(box, state=JobState.RUNNING, host="gpu8")
    assert len([step for step in repair(box.data) if "is unchanged: its host gpu" in step]) == 3
    with pytest.raises(UserError, match="there are no active jobs from host gpu9, only from gpu7 and gpu8"):
        list(repair(box.data, "gpu9"))
    steps = [*repair(box.data, "gpu7")]
    assert any(f"`sae-tui resume {job_id}` resumes it here" in step for step in steps)
    assert any(f"`sae-tui resume {command}` runs it again here" in step for step in steps)
    assert (box.job(job_id).state, box.job(other).state) == (JobState.LOST, JobState.RUNNING)
    assert box.job(job_id).error == "its host gpu7 has been silent for 1 h 00 min"


def test_repair_ends_a_job_at_once_if_no_other_machine_can_run_it(box):
    # On a local disk, a job with another host name was created before this machine was renamed.
    dead, alive = away(box, silent_s=5, state=JobState.RUNNING), away(box, silent_s=5, state=JobState.RUNNING)
    with pytest.raises(
        UserError, match=f"job {dead} is on another host, so nothing was done: its host gpu7 has been silent"
    ):
        edits.stop(box.data, dead)
    with RunLock(box.data.run(alive).root):
        assert [step.partition(":")[0] for step in repair(box.data)] == [f"job {dead} was lost"]
    assert (box.job(dead).state, box.job(alive).state) == (JobState.LOST, JobState.RUNNING)


def test_a_job_is_not_resumed_on_another_hosts_gpus(box):
    job_id = box.launch("steps=1", gpus=(0,))
    box.wait_ended(job_id)
    box.control.update(job_id, host="gpu7", boot_id="another-boot", machine_id=None, gpu_source="simulated:2")
    with pytest.raises(
        JobFileError, match="used GPU 0 on gpu7, which this host does not have; choose other GPUs with --gpus"
    ):
        box.resume(job_id, "train.n_steps=20")
    box.control.update(job_id, gpu_source="nvml")
    with pytest.raises(UserError, match="used GPUs on gpu7, and the GPUs on this host cannot be read: "):
        box.resume(job_id, "train.n_steps=20")
    assert box.job(job_id).state == JobState.FINISHED


def test_a_supervisor_sends_heartbeats_and_records_a_new_host_name(box):
    job_id = box.launch("steps=100000", gpus=(0,))
    box.wait_steps(job_id)
    job = box.job(job_id)
    assert (job.host, job.boot_id, job.machine_id) == (socket.gethostname(), boot_id(), machine.machine_id())
    assert machine.silence(box.data, job).words == "is alive"
    box.control.move(job_id, "new-name")
    assert {box.job(job_id).host, *(lease.host for lease in box.control.leases())} == {"new-name"}
    edits.stop(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED


def test_a_new_host_name_is_recorded_at_once_to_keep_a_single_queue(box, monkeypatch):
    job_id = box.record()
    paths = box.data.run(job_id)
    paths.create()
    sign = Sign(box.control, job_id, paths, lambda: None)
    sign.turn()
    monkeypatch.setattr(socket, "gethostname", lambda: "new-name")
    sign.turn()
    assert box.job(job_id).host == "new-name"
