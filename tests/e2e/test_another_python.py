"""Tests that a job is trained and evaluated with another environment's Python, named in the settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.box import Box
from support.environments import make_environment


@pytest.mark.timeout(300)
def test_ranks_and_evaluations_use_the_python_named_in_the_settings(box: Box, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    box.data.create()
    box.data.settings_file.write_text(f'python = "{python}"\n')
    box.data.settings_file.chmod(0o600)
    quick = ("--gpus", "cpu", "--set", "train.report_card=false")
    job_id = box.shell("launch", str(box.job_file(2)), *quick)["id"]
    assert box.wait_for_state(job_id, "finished", "failed")["state"] == "finished"
    assert f'\npython = "{python}"\n' in box.data.run(job_id).job_file.read_text()
    # The job has recorded its Python, so later changes to the settings do not affect it.
    box.data.settings_file.unlink()
    assert "was evaluated: " in box.shell("eval", str(job_id), "--cpu", "--wait")["message"]
    starts = (tmp_path / "starts").read_text()
    run = box.data.run(job_id)
    for words in (f"rank {run.rank_spec(1)}", f"eval {run.root} "):
        assert f"{python} -P -m trainer {words}" in starts
