"""Tests for errors of `sae-tui export`; `test_skill` checks a successful export."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_an_impossible_export_names_the_reason_and_writes_nothing(shell) -> None:
    out = shell.folder / "out"
    assert shell.errors("export", 7, "--out", out, code=1) == [
        "sae-tui: error: there is no job 7; `sae-tui jobs` lists them"
    ]
    job_id = shell.json("launch", shell.job_file, "--gpus", "cpu", "--hold")["id"]
    error = shell.json("export", job_id, "--out", out, "--only", "k=3", code=1)["error"]
    assert "checkpoint" in error["message"]
    assert not out.exists()
