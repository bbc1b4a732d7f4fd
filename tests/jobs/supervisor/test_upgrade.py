"""Tests for upgrading the package while a job waits."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sae_tui.jobs import edits
from sae_tui.jobs.supervisor import upgrade
from trainer.contract.store.states import JobState

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a copy of the packages, which all programs started afterwards use."""
    folder = tmp_path / "installed"
    for name in ("sae_tui", "trainer"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("data"))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def rename(package: Path, name: str, new_name: str) -> None:
    """Rename a function in all files, as a new version might do."""
    for file in package.rglob("*.py"):
        text = file.read_text()
        if name in text:
            file.write_text(text.replace(name, new_name))


def test_jobs_waiting_during_an_upgrade_start_and_stop_in_the_new_version(box, installed):
    runs, stops = (box.launch("steps=1", place={"hold": True}) for _ in range(2))
    before = {job_id: box.job(job_id).supervisor for job_id in (runs, stops)}
    rename(installed / "sae_tui", "is_gone", "folder_is_gone")
    rename(installed / "sae_tui", "run_hook", "run_the_hook")
    edits.release(box.data, box.control, runs)
    edits.stop(box.data, stops)
    assert (box.wait_ended(runs).state, box.wait_ended(stops).state) == (JobState.FINISHED, JobState.STOPPED)
    assert all(box.job(job_id).supervisor != supervisor for job_id, supervisor in before.items())


@pytest.mark.slow
def test_a_job_waits_while_the_package_is_only_partly_installed(box, installed):
    job_id = box.launch("steps=1", place={"hold": True})
    left = installed / "sae_tui" / "jobs" / "supervisor" / "attempt.py"
    text = left.read_text()
    left.unlink()
    edits.release(box.data, box.control, job_id)
    box.wait_for(lambda: box.job(job_id).waits_for == "sae-tui is being upgraded", "the reason for waiting")
    left.write_text(text)
    assert box.wait_ended(job_id).state == JobState.FINISHED


def test_sigterm_stops_a_waiting_job_even_after_the_package_was_removed(box, installed):
    job_id = box.launch("steps=1", place={"hold": True})
    shutil.rmtree(installed / "sae_tui" / "jobs")
    supervisor = box.job(job_id).supervisor
    supervisor.send(signal.SIGTERM)
    assert box.wait_ended(job_id).state == JobState.STOPPED
    box.wait_for(lambda: not supervisor.is_alive(), "the supervisor to end")
    assert json.loads(box.data.run(job_id).exit_file.read_text())["state"] == "stopped"


def test_a_requested_stop_does_not_wait_forever_for_a_removed_package(monkeypatch):
    program = upgrade.Installed()
    monkeypatch.setattr(upgrade, "PACKAGES", (Path("removed"),))
    monkeypatch.setattr(upgrade, "_loads", lambda: False)
    assert not program.may_end()
    monkeypatch.setattr(upgrade, "REMOVED_AFTER_S", 0.0)
    assert program.may_end()
    assert not program.restart_if_replaced()


def test_unchanged_files_are_not_mistaken_for_an_upgrade():
    state = "from sae_tui.jobs.supervisor.upgrade import Installed; print(Installed().restart_if_replaced())"
    done = subprocess.run([sys.executable, "-c", state], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert upgrade.Installed().is_current()
