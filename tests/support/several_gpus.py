"""One rank that reports NCCL's memory and activity; `tests/benchmarks/gpu_several.py` runs it.

Usage: `several_gpus.py SPEC.json memory|profile D_IN`. Rank 0 writes the results next to the job.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.autograd import DeviceType, profiler

from trainer.contract.paths import RunPaths
from trainer.contract.runs.rank_spec import read_spec
from trainer.contract.settings.job_file import load_job
from trainer.contract.settings.sources import DataShape
from trainer.measuring.bench_rank import RepeatedStep
from trainer.parallel.arrange import arrange
from trainer.parallel.calibrate import synchronise
from trainer.parallel.process_group import World, join
from trainer.ranks.rank import end_with_parent, rank_device

WARM_UP, N_TIMED = 10, 20


def memory(world: World, steps: RepeatedStep, used: Callable[[], int]) -> dict[str, Any]:
    """Return the bytes used on this GPU outside PyTorch: after steps, after an all-to-all, and after a save."""
    found = {}
    steps.take(2)
    found["after steps"] = used()
    world.group.to_owners(torch.zeros(world.size, 2**20, device=world.device))
    found["after all-to-all"] = used()
    steps.learners[0].state.collect()
    found["after a save"] = used()
    return found


def profile(world: World, steps: RepeatedStep) -> dict[str, Any]:
    """Return the duration of a step with dead latents, and its kernel timeline if it ran on a GPU."""
    device = world.device
    for learner in steps.learners:
        since_fired(learner.sae)
    steps.take(WARM_UP)
    synchronise(device)
    began = time.perf_counter()
    steps.take(N_TIMED)
    synchronise(device)
    step_ms = 1e3 * (time.perf_counter() - began) / N_TIMED
    with profiler.profile(use_kineto=True, use_device="cuda" if device.type == "cuda" else None) as traced:
        steps.take(1)
        synchronise(device)
    events = [
        event
        for event in traced.function_events
        if event.device_type != DeviceType.CPU and not event.is_user_annotation
    ]
    first = min((event.time_range.start for event in events), default=0)
    line = [
        (event.name[:80], (event.time_range.start - first) / 1e3, event.time_range.elapsed_us() / 1e3)
        for event in events
    ]
    of_nccl = [one for one in line if "nccl" in one[0].lower()]
    busy = sum(ms for *_, ms in line)
    return {"step_ms": step_ms, "kernels_ms": busy, "nccl_ms": sum(ms for *_, ms in of_nccl), "nccl": of_nccl}


@torch.no_grad()
def since_fired(sae: Any) -> None:
    """Make 3 % of this rank's latents dead: they cannot fire and have not fired for 10⁹ tokens."""
    some = slice(0, max(1, 3 * len(sae.b_enc) // 100))
    sae.b_enc[some] -= 1e4
    sae.n_tokens_since_fired[some] = 10**9
    sae.note_since_fired(sae.n_tokens_since_fired)


def used_bytes(device: torch.device) -> int:
    """Return the bytes used on a GPU but not reserved by PyTorch: CUDA's context, NCCL, other processes."""
    if device.type != "cuda":
        return 0
    torch.zeros(1, device=device)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


def main(spec_file: Path, what: str, d_in: int) -> None:
    end_with_parent()
    spec, rank = read_spec(spec_file), int(os.environ["RANK"])
    device = rank_device(spec, rank)
    before = used_bytes(device)

    def used() -> int:
        return used_bytes(device) - before

    world = join(device, rank, spec.world_size, RunPaths(spec.run_dir).attempt(1) / "rendezvous")
    joined = used()
    settled, parallel, _ = arrange(world, load_job(RunPaths(spec.run_dir).job_file), DataShape(d_in, None, 0))
    steps = RepeatedStep(settled, d_in, None, parallel)
    found = memory(world, steps, used) if what == "memory" else profile(world, steps)
    if rank == 0:
        (spec.run_dir / "found.json").write_bytes(msgspec.json.encode({"after joining": joined} | found))
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
