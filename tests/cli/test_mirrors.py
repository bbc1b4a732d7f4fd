"""Tests for `sae-tui resume URL`, which downloads a job from the mirror of another machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.conftest import Shell

from tests.contract.runs.test_checkpoint_mirror import RUN, Mirror
from trainer.contract.runs.checkpoint_mirror import SAE, MirroredFolder, described
from trainer.contract.store.states import JobState

LANGUAGE_MODEL = """
name = "theirs"
[data]
source = "model"
model = "evil/model"
hook = "resid_post.3"
text = "text"
remote_code = true
[train]
n_steps = 10
[sae]
k = 2
[launch]
gpus = "cpu"
python = "/their/python"
"""


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    (tmp_path / "theirs").mkdir()
    one = Mirror(tmp_path / "theirs")
    one.mirror.claim()
    return one


def test_a_strangers_job_runs_no_code_without_consent(shell: Shell, mirror: Mirror) -> None:
    mirror.put(3, job=LANGUAGE_MODEL)
    refused = shell.run("resume", mirror.url, code=1).stderr
    assert 'data.remote_code: runs the Python code that comes with "evil/model" as you; add --allow-code' in refused
    assert shell.json("jobs") == []
    assert list((shell.data.root / "runs").iterdir()) == []
    # With consent, the job is downloaded, but a path of their Python is never used.
    said = shell.run("resume", mirror.url, "--allow-code", code=1).stderr
    assert "job 1 was downloaded" in said
    (job,) = shell.json("jobs")
    assert (job["name"], job["state"], job["step"]) == ("theirs", JobState.STOPPED, 3)
    assert "their/python" not in shell.data.run(1).job_file.read_text()


def test_a_job_whose_data_is_missing_here_is_downloaded_and_says_what_to_do(shell: Shell, mirror: Mirror) -> None:
    text = shell.job_file.read_text()
    mirror.put(3, job=text.replace(str(shell.folder), "/not/here") + '[launch]\ngpus = "cpu"\n')
    said = shell.run("resume", mirror.url, code=1).stderr
    assert "job 1 was downloaded" in said
    assert "`sae-tui resume 1` tries again" in said
    assert "data.path" in said
    assert shell.json("job", 1)["state"] == JobState.STOPPED
    said = shell.run("resume", mirror.url, "1", code=2).stderr
    assert "the URL of a mirror cannot be combined with other jobs" in said


def test_a_finished_job_is_downloaded_with_its_sae(shell: Shell, mirror: Mirror, tmp_path: Path) -> None:
    mirror.put(5, job=shell.job_file.read_text())
    (tmp_path / "cfg.json").write_text("{}")
    files = {"cfg.json": tmp_path / "cfg.json"}
    mirror.mirror.put(SAE, files, MirroredFolder(RUN, 5, described(files)))
    shown = shell.json("resume", mirror.url)
    assert shown == {"id": 1, "message": f"job 1 was downloaded from {mirror.url} at step 5; it has finished"}
    job = shell.json("job", 1)
    assert (job["state"], job["step"], job["mirrored"]) == (JobState.FINISHED, 5, None)
    assert job["output_path"] == str(shell.data.sae(1))
    assert (shell.data.sae(1) / "cfg.json").read_text() == "{}"
