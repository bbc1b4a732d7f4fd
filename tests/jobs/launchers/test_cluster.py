"""A job of SLURM whose controller is a script: how a busy, unreachable or forgetful one is taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sae_tui.jobs.launchers import cluster
from sae_tui.jobs.launchers.cluster import Seen, SlurmError, SlurmJob
from sae_tui.jobs.launchers.slurm import cancel_left_behind


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that puts a shell script in the place of a command."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(cluster, "LOOK_EVERY_S", 0.01)

    def put(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    return put


def looked(job: SlurmJob, times: int = 1) -> Seen | None:
    """Ask the controller so many times, and return what is then known of the job."""
    for _ in range(times):
        job._begun = 0.0
        job.look()
        while job._look is not None:
            time.sleep(0.01)
            job.look()
    return job.seen


def test_state_reason_and_nodes_are_squeues(program) -> None:
    program("squeue", "echo 'PENDING|(Resources, or so)|'")
    assert looked(SlurmJob("7")) == Seen("PENDING", "(Resources, or so)", "")


def test_a_controller_that_does_not_answer_changes_nothing(program) -> None:
    job = SlurmJob("7")
    program("squeue", "echo 'RUNNING|None|n1'")
    looked(job)
    program("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert looked(job, times=5) == Seen("RUNNING", "None", "n1")


def test_nobody_waits_for_a_controller_that_hangs(program, monkeypatch) -> None:
    monkeypatch.setattr(cluster, "TIMEOUT_S", 0.2)
    program("squeue", "exec sleep 60")
    job, begun = SlurmJob("7"), time.monotonic()
    assert not job.look()
    assert looked(job) is None
    assert time.monotonic() - begun < 10


def test_a_job_that_slurm_has_forgotten_is_over(program) -> None:
    program("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    job = SlurmJob("7")
    assert looked(job) is None
    state = looked(job, times=3)
    assert state is not None
    assert state.is_over


@pytest.mark.parametrize("left", ["--user=ann", "7 8", "٧", "", "7_1"])
def test_what_is_no_number_is_not_cancelled_as_a_job(program, tmp_path, left) -> None:
    program("scancel", f"touch {tmp_path}/asked")
    (tmp_path / "slurm_job").write_text(left)
    cancel_left_behind(tmp_path)
    assert not (tmp_path / "asked").exists()
    with pytest.raises(SlurmError, match="slurm_job holds no number of a SLURM job"):
        SlurmJob.read(tmp_path / "slurm_job")
    (tmp_path / "slurm_job").write_text("7\n")
    cancel_left_behind(tmp_path)
    assert (tmp_path / "asked").exists()


def test_of_several_clusters_only_the_id_counts_and_a_refusal_is_told(program) -> None:
    program("sbatch", "echo '12;cluster'")
    assert SlurmJob.submit(["sbatch"]).id == "12"
    program("sbatch", "echo 'Welcome to the cluster'")
    with pytest.raises(SlurmError, match='sbatch answered "Welcome to the cluster", not with a job\'s number'):
        SlurmJob.submit(["sbatch"])
    program("sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    with pytest.raises(SlurmError, match="SLURM refused it: sbatch: error: Invalid account"):
        SlurmJob.submit(["sbatch"])
    with pytest.raises(SlurmError, match="nowhere cannot be started: No such file"):
        SlurmJob.submit(["nowhere"])
