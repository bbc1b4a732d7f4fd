"""A rank that reports where the host waits for the GPU during a step. `tests/benchmarks/gpu_ranks.py` runs it."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import msgspec

from trainer.contract.paths import RunPaths
from trainer.contract.runs.rank_spec import read_spec
from trainer.contract.settings.job_file import load_job
from trainer.contract.settings.sources import DataShape
from trainer.measuring.bench_rank import RepeatedStep
from trainer.parallel.arrange import arrange
from trainer.parallel.process_group import join
from trainer.ranks.rank import end_with_parent, rank_device
from trainer.self_test.learning import waits_of

WARM_UP = 5


def main(spec_file: Path, d_in: int) -> None:
    """Take warm-up steps and one more step. Rank 0 writes where its host waited for the GPU in the last step."""
    end_with_parent()
    spec, rank = read_spec(spec_file), int(os.environ["RANK"])
    job = load_job(RunPaths(spec.run_dir).job_file)
    world = join(rank_device(spec, rank), rank, spec.world_size, RunPaths(spec.run_dir).attempt(1) / "rendezvous")
    settled, parallel, _ = arrange(world, job, DataShape(d_in, None, 0))
    steps = RepeatedStep(settled, d_in, None, parallel)
    steps.take(WARM_UP)
    places = waits_of(parallel.device, partial(steps.take, 1))
    if rank == 0:
        (spec.run_dir / "found.json").write_bytes(msgspec.json.encode({"waits": places}))
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
