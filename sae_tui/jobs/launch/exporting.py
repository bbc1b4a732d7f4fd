"""Writes the SAE of a job for other tools, by a process of the trainer's, since that needs torch."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs import named_python
from sae_tui.jobs.evaluation.request import python_of
from sae_tui.jobs.store_access import existing
from trainer.contract.errors import UserError
from trainer.contract.extras import refuse_without_trainer
from trainer.contract.failure import told_failure
from trainer.contract.json_file import decode_as
from trainer.contract.paths import DataDir, working_folder
from trainer.contract.planning.gpu_vendors import hide_all


class Exported(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the trainer tells of an export: which checkpoint, and the folder of its SAE, or of each of a sweep.

    Of a sweep `left_out` are the SAEs that the format cannot hold, by label with the reason.
    """

    checkpoint: str
    step: int
    output_path: str
    saes: dict[str, str] = {}
    left_out: dict[str, str] = {}
    notes: tuple[str, ...] = ()


def export_sae(data: DataDir, job_id: int, out: Path, arguments: Sequence[str]) -> Exported:
    """Write the SAE of a job into a folder; `arguments` are further ones of the trainer's export.

    Raise `UserError` where that cannot be.
    """
    with existing(data, job_id) as control:
        control.job(job_id)
    if not (python := python_of(data, job_id)):
        refuse_without_trainer()
    argv = named_python.command(python, "export", str(data.run(job_id).root), "--out", str(working_folder() / out))
    # On the CPU: it computes next to nothing.
    env = {**named_python.variables(python), **hide_all()}
    done = subprocess.run([*argv, *arguments, "--json"], stdin=subprocess.DEVNULL, capture_output=True, env=env)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = told_failure(done.stdout) or (lines[-1] if lines else "")
        raise UserError(reason or f"`trainer export` ended with {done.returncode} and told nothing")
    try:
        return decode_as(done.stdout.splitlines()[-1], Exported)
    except (ValueError, IndexError) as error:
        raise UserError(f"`trainer export` answered what is not understood: {error}") from None
