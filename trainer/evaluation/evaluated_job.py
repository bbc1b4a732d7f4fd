"""Reads the job file for the run to evaluate. Another user may own the file, so it cannot allow code to run."""

from __future__ import annotations

from pathlib import Path

from trainer.contract.runs.run_job import load_run_job
from trainer.contract.settings.consent import refuse_code
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import to_table
from trainer.contract.settings.model_source import ModelSettings
from trainer.contract.settings.toml import read_own_text, read_plain_text


def evaluated_job(file: Path, *, allows_code: bool = False) -> JobConfig:
    """Return a run's job, with its precision set to fp32.

    Raise `UserError` if the job runs a model's own code without permission, or if other users can write its file.
    """
    job = load_run_job(file, read=read_plain_text)
    if any(isinstance(settings, ModelSettings) and settings.remote_code for settings in job.hooks.values()):
        job = load_run_job(file, read=read_own_text)
        refuse_code(to_table(job), allows=allows_code)
    return job.replace("train", precision="fp32")
