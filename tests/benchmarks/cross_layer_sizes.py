"""Prints the table of sizes in docs/how-to/cross-layer.md: parameters, memory and time, by the memory and step models.

The numbers are for 80 GB H100 GPUs, bf16 and k = 32 per layer.
"""

from __future__ import annotations

from typing import NamedTuple

from trainer.contract.planning import memory, step_time
from trainer.contract.planning.choose_mode import PlannedResources, Settled, settle
from trainer.contract.planning.hardware import MeasuredHardware
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.contract.settings.sources import DataShape

GPU, FREE_BYTES, N_TOKENS = "NVIDIA H100 80GB HBM3", 78 * 10**9, 100_000_000
COUNTS = (1, 2, 4, 8)


class Size(NamedTuple):
    """A language model's number of layers and width, and the latents per layer."""

    model: str
    n_layers: int
    d: int
    d_sae: int


SIZES = (
    Size("GPT-2 small", 12, 768, 24_576),
    Size("SmolLM2-135M", 30, 576, 4_608),
    Size("Gemma-3-1B", 26, 1_152, 16_384),
    Size("Llama-3.2-1B", 16, 2_048, 32_768),
    Size("Gemma-2-2B", 26, 2_304, 16_384),
    Size("Llama-3.2-1B", 16, 2_048, 65_536),
)


def job_of(size: Size) -> JobConfig:
    table = {
        "data": {"path": "x", "hook": [f"mlp.{layer}" for layer in range(size.n_layers)]},
        "sae": {"architecture": "batch_topk", "d_sae": size.d_sae, "k": 32, "cross_layer": True},
        "train": {"n_tokens": N_TOKENS, "precision": "bf16"},
    }
    job, problems = parse_job(table)
    assert job is not None, problems
    return job


def planned(size: Size, n_gpus: int) -> Settled:
    speeds = MeasuredHardware().speeds(GPU, "bf16", n_gpus)
    work = Workload(job_of(size), n_gpus, DataShape(size.d, size.d, 10**9), GPU)
    return settle(work, PlannedResources(speeds, FREE_BYTES))


def minutes(settled: Settled) -> float:
    return step_time.run_seconds(settled.work, settled.time) / 60


def main() -> None:
    print("| model, layers × latents | parameters | fewest GPUs | memory per GPU | mode | 100 M tokens | on 8 GPUs |")
    print("|---|---|---|---|---|---|---|")
    for size in SIZES:
        fewest = next(n for n in COUNTS if planned(size, n).fits)
        settled, all_eight = planned(size, fewest), planned(size, 8)
        n_parameters = sum(memory.n_parameters(settled.work, one.sae) for one in settled.work.members.values())
        print(
            f"| {size.model}, {size.n_layers} × {size.d_sae:,} | {n_parameters / 1e9:.1f} G | {fewest} "
            f"| {settled.needs_bytes / 1e9:.0f} GB | {settled.job.parallel.mode} "
            f"| {minutes(settled):.0f} min | {minutes(all_eight):.0f} min |"
        )


if __name__ == "__main__":
    main()
