"""Exports a job's SAE for other tools. The export runs in a trainer process because it needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.evaluation.request import python_of
from sae_tui.jobs.launch.trainer_command import OnReached, answer_of
from sae_tui.jobs.store_access import existing
from trainer.contract.extras import refuse_without_trainer
from trainer.contract.paths import DataDir, working_folder


class Exported(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The trainer's report on an export: the checkpoint, and the folder for the SAE or for each SAE in a sweep.

    If the format does not support some SAEs in a sweep, `left_out` maps their labels to the reasons.
    """

    checkpoint: str
    step: int
    output_path: str
    saes: dict[str, str] = {}
    left_out: dict[str, str] = {}
    notes: tuple[str, ...] = ()


def export_sae(
    data: DataDir, job_id: int, out: Path, arguments: Sequence[str], on_reached: OnReached | None = None
) -> Exported:
    """Export a job's SAE to a folder; `arguments` are passed to the trainer's `export` command.

    Raise `UserError` if the export fails.
    """
    with existing(data, job_id) as control:
        control.job(job_id)
    if not (python := python_of(data, job_id)):
        refuse_without_trainer()
    words = [str(data.run(job_id).root), "--out", str(working_folder() / out), *arguments]
    return answer_of("export", words, Exported, python=python, on_reached=on_reached)
