"""Runs a rank that srun started on a cluster node; it reports to the supervisor through files in the run folder."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.paths import RunPaths, open_private
from trainer.contract.runs.checkpoint_manifest import newest_whole
from trainer.contract.runs.rank_spec import RankSpec, srun_environment
from trainer.ranks import staging
from trainer.ranks.rank import end_with_parent, run
from trainer.ranks.rank_parent import fork_rank


def join_launched(spec: RankSpec) -> int:
    """Run this process as the rank that srun assigned, and return its exit code.

    If the cluster restarts the job, resume from the newest checkpoint.
    """
    os.environ.update(srun_environment(spec))
    rank, paths = int(os.environ["RANK"]), RunPaths(spec.run_dir)
    _write_to(paths.log(rank))
    end_with_parent()
    if not staging.is_staged():
        # A rank that restarted itself already has a watching parent.
        fork_rank(paths.rank_mark(spec.attempt, rank))
    resume_from = spec.resume_from or newest_checkpoint(paths)
    return run(msgspec.structs.replace(spec, resume_from=resume_from), rank)


def newest_checkpoint(paths: RunPaths) -> Path | None:
    """Return the newest complete checkpoint, or None.

    All ranks find the same checkpoint, since no rank writes before all have joined the process group.
    """
    try:
        return newest_whole(paths.checkpoints)
    except UserError:
        return None


def _write_to(log: Path) -> None:
    """Redirect all output of this process to a log file, including output of libraries that bypass Python."""
    descriptor = open_private(log, os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
