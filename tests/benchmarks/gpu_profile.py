"""Measures a step on this GPU, kernel by kernel, both eager and captured, and shows the time modelled for an H200.

    PYTHONPATH=tests python tests/benchmarks/gpu_profile.py [A:topk:dead B:gated ...] [--kernels N] [--json FILE]

A case is a shape, an architecture and, for TopK kinds, optionally `dead`, which makes some latents dead so that AuxK is
active. Shape A has d_in 2304, d_sae 65536 and k 64. Shape B has d_in 768, d_sae 24576 and k 32. Shapes A and B have
4,096 tokens, in the precision selected by `auto`. Shape C is small enough for a CPU. "host" is the time that the host
takes to queue a step while the GPU is idle. All steps use one batch of random rows, as at the start of a run. SAEs with
a penalty then have many active latents and therefore use dense matmuls. The floor is the minimum time printed by
`python -m trainer bench` for this GPU. "of it" is the floor divided by the captured step time or, without a captured
step, by the eager step time.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.fake_gpu import job_of
from support.roofline import modelled
from support.step_ops import recorded_step
from torch.autograd import DeviceType, profiler

from trainer.contract.planning.graph_capture import pays
from trainer.contract.planning.workload import Layout
from trainer.contract.runs import cuda_variables
from trainer.contract.settings.job import JobConfig
from trainer.measuring.bench_rank import RepeatedStep, floor, phases_ms
from trainer.parallel.base import Parallel
from trainer.parallel.calibrate import synchronise
from trainer.runtime.precision import resolve_precision

SHAPES = {"A": (2304, 65536, 64, 4096), "B": (768, 24576, 32, 4096), "C": (64, 512, 8, 256)}
KINDS = ("topk:dead", "topk", "batch_topk:dead", "matryoshka_batch_topk:dead", "jumprelu", "gated", "standard")
WARM_UP, N_TIMED, N_PROFILED = 10, 20, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[f"{shape}:{kind}" for shape in "BA" for kind in KINDS])
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="N", help="also print the N slowest kernels of each case"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cuda_variables.set_here()
    found = []
    print(
        f"{'':30} {'eager':>8} {'host':>8} {'kernels':>16} {'captured':>9} {'modelled':>9} {'floor':>7} ms {'of it':>6}"
    )
    for case in options.cases:
        figures = measured(case, torch.device(options.device))
        found.append(figures)
        show(figures, options.kernels)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        # A learner and its captured graph reference each other, so only the garbage collector frees them; nine learners
        # of shape A would fill an 80 GB GPU.
        gc.collect()
        torch.cuda.empty_cache()


def measured(case: str, device: torch.device) -> dict[str, Any]:
    """Return how many milliseconds a case's steps take, and how many each kind of kernel in these steps takes."""
    shape, architecture, *rest = case.split(":")
    d_in, d_sae, k, n_tokens = SHAPES[shape]
    job = job_of({"architecture": architecture, "d_sae": d_sae, "k": k}, {"batch_size": n_tokens, "n_steps": 10**5})
    # Compute the modelled time first, because real steps on a CPU select a different top-k implementation.
    expected = modelled_ms(job, d_in, device, dead=rest == ["dead"])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = RepeatedStep(job, d_in, None, Parallel(device))
    (learner,) = steps.learners
    recorded = learner.whole_steps
    if rest == ["dead"]:
        since_fired(learner.sae)
    steps.take_plainly()
    # The first step also compiles the kernels that no earlier case has used.
    first_step_s = milliseconds(lambda: steps.take(1), device) / 1e3
    plain, host = timed(steps, device)
    kernels, phases = profiled(steps, device)
    figures = {"case": case, "plain": plain, "host": host, "kernels": kernels, "phases": phases}
    figures["first_step_s"] = first_step_s
    if recorded:
        learner.whole_steps = recorded
        figures["recorded"], figures["replayed_by_host"] = timed(steps, device)
    if device.type == "cuda":
        figures["reserved_bytes"] = torch.cuda.max_memory_reserved()
    least = floor(steps, device, job)["floor_ms"]
    of_floor = least / figures.get("recorded", plain)
    return figures | expected | {"floor": least, "of_floor": of_floor}


def modelled_ms(job: JobConfig, d_in: int, device: torch.device, *, dead: bool) -> dict[str, float]:
    """Return the milliseconds modelled for an H200, or {} if the model cannot run in this process."""
    is_dense = "topk" not in job.sae.architecture
    is_recorded = not is_dense and pays(
        Layout(job, 1), d_in, d_in, precision=resolve_precision(job.train.precision, device)
    )
    try:
        step = recorded_step(job, d_in, dead=dead, dense=is_dense)
    except RuntimeError as error:
        print(f"no modelled time: {error}", file=sys.stderr)
        return {}
    return {"modelled": 1e3 * modelled(step, is_recorded=is_recorded).step_s}


@torch.no_grad()
def since_fired(sae: Any) -> None:
    """Make 3 % of the latents inactive, and set their number of tokens since last firing to a large value."""
    some = slice(0, 3 * sae.d_sae // 100)
    sae.b_enc[some] -= 1e4
    sae.n_tokens_since_fired[some] = 10**9
    sae.note_since_fired(sae.n_tokens_since_fired)


def timed(steps: RepeatedStep, device: torch.device) -> tuple[float, float]:
    """Return the time per step, and the time the host takes to launch a step on an idle device, in milliseconds."""
    steps.take(WARM_UP)
    whole = milliseconds(lambda: steps.take(N_TIMED), device) / N_TIMED
    host = []
    for _ in range(5):
        began = time.perf_counter()
        steps.take(1)
        host.append(1e3 * (time.perf_counter() - began))
        synchronise(device)
    return whole, statistics.median(host)


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    began = time.perf_counter()
    work()
    synchronise(device)
    return 1e3 * (time.perf_counter() - began)


def profiled(steps: RepeatedStep, device: torch.device) -> tuple[list[tuple[str, float, float]], dict[str, float]]:
    """Return each kind of kernel with its count and milliseconds, longest first, and the milliseconds of each phase."""
    with profiler.profile(use_kineto=True, use_device="cuda" if device.type == "cuda" else None) as profile:
        steps.take(N_PROFILED)
        synchronise(device)
    of_kind: dict[str, list[float]] = {}
    for event in profile.function_events:
        if event.device_type != DeviceType.CPU and not event.is_user_annotation:
            of_kind.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
    rows = [(name, len(ms) / N_PROFILED, sum(ms) / N_PROFILED) for name, ms in of_kind.items()]
    phases = {name: ms / N_PROFILED for name, ms in phases_ms(profile.function_events).items()}
    return sorted(rows, key=lambda row: -row[2]), phases


def show(figures: dict[str, Any], n_kernels: int) -> None:
    kernels = figures["kernels"]
    busy = f"{sum(ms for *_, ms in kernels):.2f} of {sum(n for _, n, _ in kernels):.0f}"
    recorded = f"{figures['recorded']:9.2f}" if "recorded" in figures else f"{'':9}"
    times = (
        f"{figures['plain']:8.2f} {figures['host']:8.2f} {busy:>16} {recorded} {figures.get('modelled', math.nan):9.2f}"
    )
    print(f"{figures['case']:30} {times} {figures['floor']:7.2f}    {figures['of_floor']:6.0%}", flush=True)
    for name, n, ms in kernels[:n_kernels]:
        print(f"    {ms:8.3f} ms x{n:3.0f} {name[:100]}")


if __name__ == "__main__":
    main()
