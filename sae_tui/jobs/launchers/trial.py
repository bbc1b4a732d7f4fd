"""Asks SLURM, with `sbatch --test-only`, when and where it would start a job, without submitting the job."""

from __future__ import annotations

import re
import shutil
from datetime import datetime
from pathlib import Path

from sae_tui.jobs.launchers.cluster import SlurmError, run_slurm
from sae_tui.jobs.launchers.sbatch import submission
from trainer.contract.errors import Problem
from trainer.contract.planning.workload import ONE_PROCESS
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.settings.command import CommandJob
from trainer.contract.settings.job import AnyJob
from trainer.contract.store.rows import Device

WITHIN_S = 10.0
_STARTS = re.compile(r"Job \S+ to start at (\S+) using \d+ processors on (?:nodes? )?(\S+)(?: in partition (\S+))?")
# Maps a pattern in SLURM's errors to the setting that is wrong. The first match counts.
_SETTINGS = {
    r"account": "launch.account",
    r"partition": "launch.partition",
    r"time": "launch.time_limit",
    r"qos": "launch.sbatch_options (--qos)",
    r"memory": "launch.sbatch_options (--mem)",
    r"feature": "launch.sbatch_options (--constraint)",
    r"node name": "launch.sbatch_options (--nodelist or --exclude)",
    r"gres|generic resource|gpu": "launch.gpus or launch.sbatch_options (--gres)",
    r"node count": "launch.nodes",
    r"processors|cpu|node configuration": "launch.nodes, launch.gpus or launch.sbatch_options",
}
_PREFIX = re.compile(r"^(sbatch: )?((fatal|error|allocation failure): )*")


def would_start(job: AnyJob, world_size: int, device: Device, mode: str) -> str | Problem:
    """Return when and where SLURM would start a job, or the reason why it would not; "" without sbatch."""
    if shutil.which("sbatch") is None:
        return ""
    nowhere = Path("/dev/null")
    as_one = isinstance(job, CommandJob) or mode in ONE_PROCESS
    spec = RankSpec(nowhere, nowhere, 1, world_size, device, as_one_process=as_one)
    *words, _ = submission(spec, job.launch, job.name, nowhere, nowhere)
    try:
        answer = run_slurm([*words, "--test-only", "--wrap=true"], within_s=WITHIN_S, with_errors=True)
    except SlurmError as error:
        return _refusal(str(error))
    if not (match := _STARTS.search(answer)):
        return ""
    start, nodes, partition = match.groups()
    word = "nodes" if re.search("[,[]", nodes) else "node"
    return f"SLURM would start it {_at(start)} on {word} {nodes}{f' in partition {partition}' if partition else ''}"


def _at(start: str) -> str:
    """Return a start time, which SLURM gives in this host's time zone."""
    try:
        return f"at {datetime.fromisoformat(start):%Y-%m-%d %H:%M}"
    except ValueError:
        return f"at {start}"


def _refusal(reason: str) -> Problem:
    if "received no response" in reason:
        return Problem("launch.backend", f"SLURM was not asked about the job: {reason}", "warning")
    words = _PREFIX.sub("", reason).strip()
    setting = next((path for pattern, path in _SETTINGS.items() if re.search(pattern, words, re.IGNORECASE)), "launch")
    return Problem(setting, f"SLURM would refuse the job: {words}")
