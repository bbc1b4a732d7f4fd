"""One rank of a deterministic job, with or without CUDA graphs; `tests/benchmarks/gpu_job.py` runs it.

Usage: `graph_rank.py SPEC.json graphs|plain`. The number of replayed steps is written to a file next to the job. By
default, deterministic jobs do not use CUDA graphs, because a run resumed on another device would differ. Here, all runs
use the same device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.contract.runs.rank_spec import read_spec
from trainer.ranks import rank


class Again:
    """Replaces a CUDA graph on devices without CUDA: runs the work again instead of replaying it."""

    def __init__(self) -> None:
        self._work: Callable[[], None] = lambda: None

    def record(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


def main(spec_file: Path, kind: str) -> None:
    from trainer.training import loop
    from trainer.training.graph_replay import CudaTape, GraphReplay

    spec = read_spec(spec_file)
    made: list[GraphReplay] = []

    def replay_for(learner: Any, _job: Any, _parallel: Any, outliers: Any, report: Any) -> GraphReplay | None:
        if kind == "plain":
            return None
        made.append(GraphReplay(learner, CudaTape if spec.device == "cuda" else Again, outliers, report))
        return made[-1]

    vars(loop)["replay_for"] = replay_for
    code = rank.run(spec, 0)
    n_replayed = sum(steps.n_replayed for steps in made)
    spec_file.with_name("replayed").write_text(str(n_replayed))
    os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
