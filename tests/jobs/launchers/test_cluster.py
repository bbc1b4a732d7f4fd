"""Tests for a SLURM job whose controller is busy or unreachable, or has forgotten the job.

Shell scripts replace SLURM's commands.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sae_tui.jobs.launchers import cluster
from sae_tui.jobs.launchers.base import AttemptSetup
from sae_tui.jobs.launchers.cluster import Seen, SlurmError, SlurmJob
from sae_tui.jobs.launchers.slurm import SlurmAttempt, cancel_left_behind
from tests.jobs.launchers.test_sbatch import job, spec
from trainer.contract.paths import RunPaths


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that replaces a command with a shell script."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(cluster, "LOOK_EVERY_S", 0.01)

    def put(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    return put


def looked(job: SlurmJob, times: int = 1) -> Seen | None:
    """Poll the controller `times` times, and return the job's last known state."""
    for _ in range(times):
        job._begun = 0.0
        job.look()
        while job._look is not None:
            time.sleep(0.01)
            job.look()
    return job.seen


def test_a_jobs_state_reason_and_nodes_come_from_squeue(program) -> None:
    program("squeue", "echo 'PENDING|(Resources, or so)|'")
    assert looked(SlurmJob("7")) == Seen("PENDING", "(Resources, or so)", "")


def test_a_controller_that_does_not_answer_leaves_a_jobs_state_unchanged(program) -> None:
    job = SlurmJob("7")
    program("squeue", "echo 'RUNNING|None|n1'")
    looked(job)
    program("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert looked(job, times=5) == Seen("RUNNING", "None", "n1")


def test_a_hanging_controller_does_not_block_the_caller(program, monkeypatch) -> None:
    monkeypatch.setattr(cluster, "TIMEOUT_S", 0.2)
    program("squeue", "exec sleep 60")
    job, begun = SlurmJob("7"), time.monotonic()
    assert not job.look()
    assert looked(job) is None
    assert time.monotonic() - begun < 10


def test_a_job_that_slurm_no_longer_knows_about_counts_as_over(program) -> None:
    program("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    job = SlurmJob("7")
    assert looked(job) is None
    state = looked(job, times=3)
    assert state is not None
    assert state.is_over


@pytest.mark.parametrize("left", ["--user=ann", "7 8", "٧", "", "7_", "7_1-3"])
def test_an_invalid_job_number_is_never_passed_to_scancel(program, tmp_path, left) -> None:
    program("scancel", f"touch {tmp_path}/asked")
    (tmp_path / "slurm_job").write_text(left)
    cancel_left_behind(tmp_path)
    assert not (tmp_path / "asked").exists()
    with pytest.raises(SlurmError, match="slurm_job contains no SLURM job id"):
        SlurmJob.read(tmp_path / "slurm_job")
    (tmp_path / "slurm_job").write_text("7\n")
    cancel_left_behind(tmp_path)
    assert (tmp_path / "asked").exists()


def test_the_job_id_is_read_from_sbatch_output_and_a_refusal_is_reported(program) -> None:
    program("sbatch", "echo '12;cluster'")
    assert SlurmJob.submit(["sbatch"]).id == "12"
    program("sbatch", "echo 'Welcome to the cluster'")
    with pytest.raises(SlurmError, match='sbatch printed "Welcome to the cluster", not a job id'):
        SlurmJob.submit(["sbatch"])
    program("sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    with pytest.raises(SlurmError, match="SLURM refused the job: sbatch: error: Invalid account"):
        SlurmJob.submit(["sbatch"])
    with pytest.raises(SlurmError, match="nowhere cannot be started: No such file"):
        SlurmJob.submit(["nowhere"])


def test_the_tasks_of_an_array_share_one_query_and_each_reads_its_own_line(program, tmp_path, monkeypatch) -> None:
    lines = "7_0|RUNNING|None|n1\n7_1|PENDING|JobArrayTaskLimit|\n7_10|FAILED|None|n3"
    program("squeue", f'echo "$@" >> {tmp_path}/asked\nprintf "{lines}"')
    monkeypatch.setattr(cluster, "LOOK_EVERY_S", 60.0)
    jobs = [SlurmJob(f"7_{task}") for task in (0, 1, 10, 4)]
    for one in jobs:
        one.share_looks(tmp_path / "locks")
        one._begun = -60.0
        while not (one.seen or one._unknown):
            one.look()
    assert (tmp_path / "asked").read_text() == "-h -t all -j 7 -r -o %i|%T|%r|%N\n"
    running, pending = Seen("RUNNING", "None", "n1"), Seen("PENDING", "JobArrayTaskLimit")
    assert [one.seen for one in jobs] == [running, pending, Seen("FAILED", "None", "n3"), None]


def test_cancelling_a_pending_task_never_uses_a_filter_that_would_cancel_the_whole_array(program, tmp_path) -> None:
    program("scancel", f'echo "$@" >> {tmp_path}/asked')
    for name, state in (("7_1", "PENDING"), ("7_2", "RUNNING"), ("8", "PENDING")):
        job = SlurmJob(name)
        job.seen = Seen(state)
        job.cancel("--state=PENDING")
    assert (tmp_path / "asked").read_text().splitlines() == ["7_1", "--state=PENDING 7_2", "--state=PENDING 8"]


def test_an_attempt_that_has_ended_lets_the_other_tasks_of_its_array_ask(program, tmp_path: Path) -> None:
    program("squeue", "exec sleep 60")
    setup = AttemptSetup(7, job(gpus="cpu"), RunPaths(tmp_path), spec(1, "cpu", str(tmp_path)))
    ended, other = SlurmAttempt(setup), SlurmJob("7_2")
    ended._slurm = SlurmJob("7_1")
    for one in (ended._slurm, other):
        one.share_looks(tmp_path / "locks")
    ended._slurm.look()
    assert ended._slurm._look
    ended.wait(0)
    program("squeue", "echo '7_2|RUNNING|None|n1'")
    assert looked(other) == Seen("RUNNING", "None", "n1")
