"""One rank of a probe, started by `trainer.measuring.bench`: measures device and communication speeds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import torch

from trainer.contract.errors import UserError
from trainer.contract.paths import RunPaths
from trainer.contract.runs.rank_spec import read_spec
from trainer.parallel.calibrate import device_name, measure, pairs_of
from trainer.parallel.process_group import join
from trainer.ranks.rank import end_with_parent, rank_device
from trainer.runtime.precision import resolve_precision, set_matmul_precision


def main(spec_file: Path, asked: str) -> None:
    """Measure the speeds; rank 0 writes the results from all ranks to `found.json`.

    `asked` is the job's precision setting, possibly "auto". Raise `UserError` if a rank has too little memory.
    """
    end_with_parent()
    spec, rank = read_spec(spec_file), int(os.environ["RANK"])
    device = rank_device(spec, rank)
    precision = resolve_precision(asked, device)
    set_matmul_precision(precision)
    world = join(device, rank, spec.world_size, RunPaths(spec.run_dir).attempt(1) / "rendezvous")
    speeds = measure(world, precision)
    if starved := [rank for rank, one in enumerate(speeds) if not one.is_measured]:
        raise UserError(
            f"rank {starved[0]} has too little free memory for the measurement; stop other processes on its device"
        )
    pairs = pairs_of(world)
    figures = {
        "device": device_name(device),
        "ranks": world.size,
        "precision": precision,
        "flops_per_s": [one.flops_per_s for one in speeds],
        "memory_bytes_per_s": [one.memory_bytes_per_s for one in speeds],
        "bus_bytes_per_s": speeds[0].bus_bytes_per_s if world.size > 1 else None,
        "latency_s": speeds[0].latency_s if world.size > 1 else None,
        "pairs": pairs,
    }
    if rank == 0:
        (spec.run_dir / "found.json").write_bytes(msgspec.json.encode(figures))
    world.close()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except (UserError, torch.OutOfMemoryError) as error:
        sys.exit(str(error).splitlines()[0])
