"""Checks whether SLURM manages this machine's GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from sae_tui.doctor.base import CheckedMachine, Finding
from trainer.contract.wording import duration


def check_slurm(box: CheckedMachine) -> Iterator[Finding]:
    """Report whether this shell is inside or outside a SLURM allocation, or that there is no SLURM."""
    missing = [name for name in ("sinfo", "squeue") if box.program(name) is None]
    if job := box.environ.get("SLURM_JOB_ID"):
        yield _inside(box, job)
    elif len(missing) == 2:
        yield Finding("ok", "SLURM", "not installed; jobs run on this machine")
    elif missing:
        sentence = f"{missing[0]} is missing, although other SLURM commands are installed"
        yield Finding("warning", "SLURM", sentence, "load SLURM's module, or correct $PATH")
    else:
        yield _outside(box)


def _inside(box: CheckedMachine, job: str) -> Finding:
    """Report this shell's allocation. All jobs started here end when the allocation ends."""
    nodes = box.environ.get("SLURM_JOB_NODELIST", "this machine")
    gpus = box.environ.get("SLURM_JOB_GPUS") or box.environ.get("SLURM_STEP_GPUS")
    end = box.environ.get("SLURM_JOB_END_TIME", "")
    left = f" in {duration(max(0.0, int(end) - time.time()))}" if end.isdecimal() else ""
    sentence = f"inside allocation {job} on {nodes}{f' with GPU {gpus}' if gpus else ''}; jobs end with it{left}"
    return Finding("note", "SLURM", sentence, "set train.checkpoint_every_minutes, so that little work is lost")


def _outside(box: CheckedMachine) -> Finding:
    """Report the cluster reachable from this machine, for a shell outside any allocation."""
    partitions, failure = box.output(["sinfo", "--noheader", "--format=%P"])
    if failure:
        return Finding(
            "warning", "SLURM", f"sinfo failed: {failure}", "ask the administrator whether slurmctld is running"
        )
    named = ", ".join(partitions.split()) or "none"
    sentence = f"this machine can reach a cluster (partitions: {named}), but this shell is not in an allocation"
    remedy = (
        'let SLURM start the job with launch.backend = "slurm", or allocate GPUs with `salloc --gpus=1` '
        "and start sae-tui in that allocation"
    )
    return Finding("note", "SLURM", sentence, remedy)
