"""Writes the SAE of a job for other tools, by a process of the trainer's, since that needs torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.store_access import existing
from trainer.contract.errors import UserError
from trainer.contract.failure import told_failure
from trainer.contract.json_file import decode_as
from trainer.contract.paths import DataDir, working_folder
from trainer.contract.planning.gpu_vendors import hide_all

COMMAND = (sys.executable, "-P", "-m", "trainer", "export")


class Exported(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the trainer tells of an export: which checkpoint, and the folder of its SAE, or of each of a sweep."""

    checkpoint: str
    step: int
    output_path: str
    saes: dict[str, str] = {}
    notes: tuple[str, ...] = ()


def export_sae(data: DataDir, job_id: int, out: Path, arguments: Sequence[str]) -> Exported:
    """Write the SAE of a job into a folder; `arguments` are further ones of the trainer's export.

    Raise `UserError` where that cannot be.
    """
    with existing(data, job_id) as control:
        control.job(job_id)
    argv = [*COMMAND, str(data.run(job_id).root), "--out", str(working_folder() / out), *arguments, "--json"]
    # On the CPU: it computes next to nothing.
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env={**os.environ, **hide_all()})
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = told_failure(done.stdout) or (lines[-1] if lines else "")
        raise UserError(reason or f"`trainer export` ended with {done.returncode} and told nothing")
    try:
        return decode_as(done.stdout.splitlines()[-1], Exported)
    except (ValueError, IndexError) as error:
        raise UserError(f"`trainer export` answered what is not understood: {error}") from None
