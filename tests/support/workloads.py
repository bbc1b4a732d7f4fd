"""Creates workloads for estimate tests from a job and its data width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sae_tui.jobs.launch.memory_need import used_before
from trainer.contract.planning.check_job import Machine
from trainer.contract.planning.hardware import CPU
from trainer.contract.planning.outlook import Outlook
from trainer.contract.planning.training import TrainingProposal
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sources import DataShape
from trainer.contract.store.rows import Job


def workload(
    job: JobConfig, d_in: int, ranks: int = 1, *, d_out: int | None = None, device: str = "cuda", n_tokens: int = 10**9
) -> Workload:
    """Return the workload for a job on `ranks` GPUs or CPU processes. By default, there is more than enough data."""
    return Workload(job, ranks, DataShape(d_in, d_out, n_tokens), CPU if device == "cpu" else "")


def look_of(job: JobConfig, data: DataShape, machine: Machine, past: Sequence[Job] = ()) -> Outlook:
    """Return the outlook for a job on data with this shape, using the measured memory of the earlier jobs in `past`."""
    proposal = TrainingProposal(job, machine, used_before(past))
    proposal.work = proposal.layout.on_data(data)
    return proposal.outlook


def stream_of_model(folder: Path) -> dict[str, Any]:
    """Return the data section of a job that trains on a nonexistent language model, with a text file in `folder`."""
    text = folder / "text.txt"
    text.write_text("a cat sat")
    return {"source": "model", "model": "a/model", "d_in": 8, "hook": "resid_post.0", "text": str(text)}
