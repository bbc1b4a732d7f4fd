"""Ranks that torchrun started, on one host or several: they meet by its environment and share one run folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainer.contract.job import JobConfig
from trainer.contract.paths import RunPaths
from trainer.contract.problems import UsageError, UserError
from trainer.contract.ranks import RankSpec, write_spec
from trainer.foreground import write_job
from trainer.manifest import newest_whole
from trainer.rank import run

_NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join(job: JobConfig, run_dir: Path) -> int:
    """This process as the rank that torchrun says it is; goes on where the folder holds a checkpoint already.

    So a restart by torchrun, or the same command given again, resumes. Raises `UsageError` without torchrun.
    """
    if missing := [name for name in _NEEDED if name not in os.environ]:
        message = f"{missing[0]} is not set: start it by torchrun, or use `run` on one host"
        raise UsageError(f"join: {message}")
    rank, paths = int(os.environ["RANK"]), RunPaths(run_dir)
    spec = RankSpec(
        run_dir=run_dir,
        output_dir=run_dir / "sae",
        attempt=1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        world_size=int(os.environ["WORLD_SIZE"]),
        device=_device(job),
        resume_from=_checkpoint(paths),
        on_one_host=False,
    )
    paths.create()
    if rank == 0:
        write_job(job, paths)
        write_spec(spec)
    else:
        # One rank speaks for all on torchrun's console.
        sys.stdout = paths.log(rank).open("a", encoding="utf-8")
    return run(spec, rank, job)


def _checkpoint(paths: RunPaths) -> Path | None:
    """The newest whole one, by which all ranks decide alike: none writes before all have met."""
    try:
        return newest_whole(paths.checkpoints)
    except UserError:
        return None


def _device(job: JobConfig) -> str:
    import torch

    return "cpu" if str(job.launch.gpus).startswith("cpu") or not torch.cuda.is_available() else "cuda"
