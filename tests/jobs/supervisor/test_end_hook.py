"""Tests for the user's command that runs when a job ends."""

from __future__ import annotations

import pytest

from sae_tui.jobs.supervisor.end_hook import run_hook
from sae_tui.settings import Settings, save_settings
from trainer.contract.store.states import JobState


def end(box, command: list[str]) -> None:
    job = box.job(box.record("two words", state=JobState.FINISHED, step=10, fvu=0.08, heldout_fvu=0.1341))
    save_settings(box.data.settings_file, Settings(on_job_end=command))
    run_hook(box.data, job)


def test_the_commands_environment_describes_the_ended_job(box):
    names = ("ID", "NAME", "STATE", "STEP", "FVU", "BATCH_FVU", "ERROR")
    asked = "|".join(f"$SAE_TUI_JOB_{name}" for name in names)
    end(box, ["sh", "-c", f'echo "{asked}|$SAE_TUI_DATA_DIR" >told'])
    assert (box.data.root / "told").read_text() == f"1|two words|finished|10|0.1341|0.08||{box.data.root}\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [(["sh", "-c", "exit 3"], "on_job_end exited with code 3"), (["no-such-program"], "on_job_end: [Errno 2]")],
)
def test_a_failing_command_is_logged_and_has_no_other_effect(box, capsys, command, said):
    end(box, command)
    assert said in "".join(capsys.readouterr())


def test_without_a_command_nothing_is_run_or_logged(box, capsys):
    end(box, [])
    assert "".join(capsys.readouterr()) == ""
