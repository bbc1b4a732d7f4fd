"""Runs the user's command when a job ends. The supervisor runs the command, so the app need not be open."""

from __future__ import annotations

import os
import subprocess

from sae_tui.jobs.supervisor_log import note
from sae_tui.settings import load_settings
from trainer.contract.paths import ENV_DATA_DIR, DataDir
from trainer.contract.store.rows import Job

LIMIT_S = 60.0


def run_hook(data: DataDir, job: Job) -> None:
    """Run the command in `on_job_end`, with environment variables that describe the job; errors are only logged."""
    settings, _ = load_settings(data.settings_file)
    if not settings.on_job_end:
        return
    facts = {
        "ID": job.id,
        "NAME": job.name,
        "STATE": job.state,
        "ERROR": job.error or "",
        "STEP": job.step,
        "FVU": _word(job.heldout_fvu),
        "BATCH_FVU": _word(job.fvu),
        "OUTPUT": job.output_path or "",
        "RUN_DIR": data.run(job.id).root,
    }
    environment = os.environ | {f"SAE_TUI_JOB_{name}": str(value) for name, value in facts.items()}
    # Set the data folder so that `sae-tui` finds the job if the command calls it.
    environment[ENV_DATA_DIR] = str(data.root)
    try:
        done = subprocess.run(
            settings.on_job_end, env=environment, stdin=subprocess.DEVNULL, cwd=data.root, timeout=LIMIT_S
        )
        if done.returncode:
            note(f"on_job_end exited with code {done.returncode}")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        note(f"on_job_end: {error}")


def _word(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
