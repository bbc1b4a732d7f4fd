"""Tests for the question to SLURM when it would start a job. A shell script prints what SLURM 22.05 printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sae_tui.jobs.launchers import trial
from trainer.contract.settings.job_file import parse_job

GRES = "launch.gpus or launch.sbatch_options (--gres)"
SETTINGS = "launch.nodes, launch.gpus or launch.sbatch_options"


def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str):
    """Ask a stub of sbatch about a job."""
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{script}\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    launch = {"backend": "slurm", "nodes": 2, "gpus": "auto:8", "partition": "gpu"}
    job, problems = parse_job({"data": {"path": "acts"}, "launch": launch})
    assert job, problems
    return trial.would_start(job, 16, "cuda", "tensor")


def test_slurm_is_asked_with_the_jobs_options_and_its_answer_is_shown(tmp_path, monkeypatch) -> None:
    line = "sbatch: Job 7 to start at 2026-12-01T04:23:55 using 16 processors on nodes n[1-2] in partition gpu"
    answer = ask(tmp_path, monkeypatch, f"echo '{line}' >&2")
    assert answer == "SLURM would start it at 2026-12-01 04:23 on nodes n[1-2] in partition gpu"
    asked = (tmp_path / "asked").read_text().split()
    assert {"--test-only", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--partition=gpu"} <= {*asked}


@pytest.mark.parametrize(
    ("lines", "setting"),
    [
        ("sbatch: error: no\nallocation failure: Invalid partition name specified", "launch.partition"),
        ("sbatch: error: Invalid generic resource (gres) specification", GRES),
        ("allocation failure: Invalid account or account/partition combination specified", "launch.account"),
        ("allocation failure: Requested time limit is invalid (missing or exceeds some limit)", "launch.time_limit"),
        ("allocation failure: Invalid qos specification", "launch.sbatch_options (--qos)"),
        ("allocation failure: Memory specification can not be satisfied", "launch.sbatch_options (--mem)"),
        ("allocation failure: Invalid feature specification", "launch.sbatch_options (--constraint)"),
        ("allocation failure: Requested node configuration is not available", SETTINGS),
        ("sbatch: error: the site's plugin says no", "launch"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_setting_where_slurms_message_shows_it(tmp_path, monkeypatch, lines, setting) -> None:
    problem = ask(tmp_path, monkeypatch, f"cat >&2 <<'END'\n{lines}\nEND\nexit 1")
    words = lines.splitlines()[-1].partition(": ")[2].removeprefix("error: ")
    assert (problem.path, problem.severity) == (setting, "error")
    assert problem.message == f"SLURM would refuse the job: {words}"


def test_a_busy_controller_only_leads_to_a_warning(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(trial, "WITHIN_S", 0.2)
    problem = ask(tmp_path, monkeypatch, "exec sleep 60")
    assert (problem.path, problem.severity) == ("launch.backend", "warning")
    assert "received no response within 0.2 s" in problem.message
