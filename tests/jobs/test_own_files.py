"""Tests that files whose content is executed are read only if no other user can write to them."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from sae_tui.jobs import edits
from sae_tui.jobs.launch.clone import clone_settings
from sae_tui.jobs.launchers import slurm
from sae_tui.jobs.launchers.cluster import SlurmJob
from trainer.cli import main
from trainer.contract.errors import JobFileError
from trainer.contract.files import write_own
from trainer.contract.paths import RunPaths
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, RankSpec, rank_command, write_spec
from trainer.contract.settings.job_file import dump_job
from trainer.contract.store.states import JobState
from trainer.contract.trust import open_own


@pytest.fixture
def by_slurm(box) -> Path:
    """Write the job file of job 1 with sbatch options, and make it writable by the group."""
    job = box.config("steps=3", backend="slurm", sbatch_options=["--export=ALL,BASH_ENV=/tmp/evil"])
    assert box.record(state=JobState.STOPPED, backend="slurm", config=dump_job(job)) == 1
    box.data.run(1).create()
    file = box.data.run(1).job_file
    file.write_text(dump_job(job))
    file.chmod(0o660)
    return file


def test_a_job_whose_job_file_is_writable_by_other_users_is_not_started(box):
    job_id = box.launch("steps=1", place={"hold": True})
    file = box.data.run(job_id).job_file
    file.chmod(0o660)
    edits.release(box.data, box.control, job_id)
    job = box.wait_ended(job_id)
    why = f"job.toml is ignored, because others may write to {file}; `chmod go-w` it"
    assert (job.state, job.error) == (JobState.FAILED, why)
    assert box.control.ranks(job_id) == []
    # Resuming the job rewrites the file with the right permissions.
    box.resume(job_id)
    assert box.wait_ended(job_id).state == JobState.FINISHED


def test_sbatch_options_that_others_may_have_written_are_not_used(box, by_slurm: Path) -> None:
    for action in (lambda: box.resume(1), lambda: clone_settings(box.data, 1)):
        with pytest.raises(
            JobFileError,
            match=r"launch.sbatch_options: is not taken from a file, .* others may write to",
        ):
            action()
    overrides = ['launch.sbatch_options=["--qos=high"]']
    assert clone_settings(box.data, 1, overrides).launch.sbatch_options == ["--qos=high"]
    by_slurm.chmod(0o600)
    assert clone_settings(box.data, 1).launch.sbatch_options == ["--export=ALL,BASH_ENV=/tmp/evil"]


def test_sbatch_options_from_a_job_list_writable_by_others_are_not_used(box, by_slurm: Path) -> None:
    by_slurm.unlink()
    box.data.control_db.chmod(0o660)
    for action in (lambda: clone_settings(box.data, 1), lambda: box.resume(1)):
        with pytest.raises(
            JobFileError,
            match=r"launch.sbatch_options: is not taken from a file, .* others may write to",
        ):
            action()
    assert not by_slurm.exists()


def test_the_group_may_read_but_not_write_files_that_are_executed(box, tmp_path: Path) -> None:
    for folder, mode in ((tmp_path, 0o700), (tmp_path / "shared", 0o2770)):
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
        write_own(folder / "job.toml", b"")
        assert stat.S_IMODE((folder / "job.toml").stat().st_mode) == {0o700: 0o600, 0o2770: 0o640}[mode]


def test_a_rank_rejects_a_spec_writable_by_others(tmp_path: Path, capsys) -> None:
    file = write_spec(RankSpec(tmp_path, tmp_path / "sae", 1, 1, "cpu"))
    file.chmod(0o660)
    assert main(["rank", str(file)]) == EXIT_FAILED
    assert f"ranks.json is ignored, because others may write to {file}" in capsys.readouterr().err


def test_a_foreground_run_works_on_a_file_system_without_permissions(box, tmp_path: Path) -> None:
    command = rank_command(tmp_path / "attempt1" / "ranks.json", any_owner=True)
    (tmp_path / "job.toml").write_text(dump_job(box.config("steps=1").replace("launch", gpus="cpu")))
    file = write_spec(RankSpec(tmp_path, tmp_path / "sae", 1, 1, "cpu"))
    for path in (file, tmp_path / "job.toml"):
        path.chmod(0o666)
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, (tmp_path / "sae" / "cfg.json").exists()) == (EXIT_FINISHED, True), done.stderr


def test_a_slurm_job_is_not_cancelled_if_others_may_have_written_its_id(box, monkeypatch, capsys) -> None:
    folder = box.data.run(1).attempt(1)
    folder.mkdir(parents=True)
    (folder / "slurm_job").write_text("7")
    cancelled: list[str] = []
    monkeypatch.setattr(SlurmJob, "cancel", lambda self, *_: cancelled.append(self.id))
    (folder / "slurm_job").chmod(0o660)
    slurm.cancel_left_behind(folder)
    assert cancelled == []
    assert "slurm_job is ignored, because others may write to" in capsys.readouterr().err
    (folder / "slurm_job").chmod(0o600)
    slurm.cancel_left_behind(folder)
    assert cancelled == ["7"]


def test_a_link_is_not_accepted_as_the_users_own_file(tmp_path: Path, box) -> None:
    file = RunPaths(tmp_path).job_file
    (tmp_path / "mine.toml").write_text("")
    os.symlink(tmp_path / "mine.toml", file)
    with pytest.raises(OSError, match="symbolic links"):
        open_own(file)
