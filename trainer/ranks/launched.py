"""A rank that srun started on a node of a cluster: what it leaves for who launched it are files in the run folder."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.paths import RunPaths, open_private
from trainer.contract.runs.checkpoint_manifest import newest_whole
from trainer.contract.runs.rank_spec import RankSpec, srun_environment
from trainer.ranks.rank import end_with_parent, run
from trainer.ranks.rank_parent import witnessed


def join_launched(spec: RankSpec) -> int:
    """This process as the rank that srun says it is; where the cluster starts it again, it resumes."""
    os.environ.update(srun_environment(spec))
    rank, paths = int(os.environ["RANK"]), RunPaths(spec.run_dir)
    _write_to(paths.log(rank))
    end_with_parent()
    witnessed(paths.rank_mark(spec.attempt, rank))
    resume_from = spec.resume_from or newest_checkpoint(paths)
    return run(msgspec.structs.replace(spec, resume_from=resume_from), rank)


def newest_checkpoint(paths: RunPaths) -> Path | None:
    """The newest whole one, by which all ranks decide alike: none writes before all have met."""
    try:
        return newest_whole(paths.checkpoints)
    except UserError:
        return None


def _write_to(log: Path) -> None:
    """All that this process prints, what libraries print below Python included."""
    descriptor = open_private(log, os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
