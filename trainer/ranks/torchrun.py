"""Runs ranks that torchrun started on one or more hosts; the ranks share a run folder and torchrun's rendezvous."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainer.contract.errors import JobFileError, Problem, UsageError
from trainer.contract.output import complain
from trainer.contract.paths import RunPaths, open_private
from trainer.contract.planning.hardware import read_box
from trainer.contract.printable import printable
from trainer.contract.runs import cuda_variables
from trainer.contract.runs.nccl import STAGED
from trainer.contract.runs.rank_spec import RankSpec, write_spec
from trainer.contract.runs.resume import data_notes, length_notes, stored_run, with_same_step
from trainer.contract.runs.run_job import load_run_job, settings_since
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import job_of, to_table
from trainer.contract.store.rows import Device
from trainer.ranks.foreground import own_box_file, write_job
from trainer.ranks.launched import newest_checkpoint
from trainer.ranks.loading import load_trainer
from trainer.ranks.rank import run

_NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join(job: JobConfig, run_dir: Path) -> int:
    """Run this process as the rank that torchrun assigned, and return its exit code.

    A language model runs on the training GPUs. If the run folder has a checkpoint, resume from it: restarting through
    torchrun, or running the same command again, continues the run. Raise `UsageError` if torchrun did not start this
    process.
    """
    if missing := [name for name in _NEEDED if name not in os.environ]:
        message = f"{missing[0]} is not set; start this command with torchrun, or use `run` on one host"
        raise UsageError(f"join: {message}")
    if job.model_gpus not in (0, "auto"):
        reason = "torchrun starts a rank for each GPU, so no GPU can be reserved for the language model"
        raise JobFileError([Problem("data.model_gpus", f'{reason}; use 0 or "auto"')])
    rank, paths = int(os.environ["RANK"]), RunPaths(run_dir)
    cuda_variables.set_here()
    if read_box(own_box_file()).peers_fail:
        os.environ.update(STAGED | dict(os.environ))
    job, notes = _resumed_job(job, paths, int(os.environ["WORLD_SIZE"]))
    spec = RankSpec(
        run_dir=run_dir,
        output_dir=run_dir / "sae",
        attempt=1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        world_size=int(os.environ["WORLD_SIZE"]),
        device=_device(job),
        resume_from=newest_checkpoint(paths),
        on_one_host=False,
        box_file=own_box_file(),
    )
    paths.create()
    if rank == 0:
        for note in notes:
            complain(f"warning: {printable(note)}\n")
        # The same command may have started this attempt before, so delete requests to the earlier processes.
        for file in (paths.stop_file(spec.attempt), paths.finish_file(spec.attempt)):
            file.unlink(missing_ok=True)
    else:
        # Only rank 0 prints to torchrun's console.
        sys.stdout = os.fdopen(open_private(paths.log(rank), os.O_APPEND), "a", encoding="utf-8")

    def on_met() -> None:
        # Until all ranks have joined, the other ranks are still reading the files from the last attempt.
        if rank == 0:
            write_job(job, paths)
            write_spec(spec)

    return run(spec, rank, job, on_met)


def _resumed_job(job: JobConfig, paths: RunPaths, world_size: int) -> tuple[JobConfig, list[str]]:
    """Return the job with the tokens per step that the run in the folder used, and notes about the changes.

    Raise `JobFileError` if the job's data or SAE settings differ from that run's settings.
    """
    if newest_checkpoint(paths) is None:
        return job, []
    was, stored = load_run_job(paths.job_file), stored_run(paths.root)
    # Settings that are newer than the run get values that match its behaviour, which may differ from today's defaults.
    job = job_of(to_table(job), settings_since(paths.job_file))
    for section in ("data", "sae"):
        if getattr(was, section) != getattr(job, section):
            message = f"[{section}] differs from the run in {paths.root}, which would be resumed; choose another --out"
            raise JobFileError([Problem(section, message)])
    job, notes = with_same_step(was, job, stored.last.n_devices, world_size)
    return job, [*stored.notes, *length_notes(was, job, stored, world_size), *notes, *data_notes(job, stored)]


def _device(job: JobConfig) -> Device:
    load_trainer()
    import torch

    return "cpu" if job.on_cpu or not torch.cuda.is_available() else "cuda"
