"""Bytes per GPU of a job, from its settings alone (no torch)."""

from __future__ import annotations

import msgspec

from trainer.contract.config import JobConfig

# The CUDA context with the libraries' own workspaces, and what the caching allocator cannot hand out again.
CUDA_CONTEXT_BYTES = 550 * 2**20
ALLOCATOR_SLACK = 0.10


class Memory(msgspec.Struct, frozen=True):
    """What one rank holds at the peak of a step, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    communication: int
    context: int

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


def estimate(job: JobConfig, d_in: int, world_size: int, *, device: str = "cuda") -> Memory:
    """Bytes per rank for inputs of width `d_in` on `world_size` ranks."""
    d_sae = job.sae.width(d_in)
    n_parameters = 2 * d_in * d_sae + d_sae + d_in
    weights = 4 * n_parameters
    activations = _activation_bytes(job, d_in, d_sae)
    communication = 4 * n_parameters if job.mode(world_size) == "ddp" else 0
    return Memory(
        weights=weights,
        gradients=weights,
        optimizer=2 * weights,
        activations=activations + round(ALLOCATOR_SLACK * (activations + 4 * weights)),
        communication=communication,
        context=CUDA_CONTEXT_BYTES if device == "cuda" else 0,
    )


def _activation_bytes(job: JobConfig, d_in: int, d_sae: int) -> int:
    """Pre-activations, their copy with dead latents only, the sparse activations and their gradients."""
    half = job.train.precision in ("bf16", "auto")
    value = 2 if half else 4
    wide, narrow = job.train.batch_size * d_sae, job.train.batch_size * d_in
    return wide * (value + 4 + 4 + 4) + 8 * 4 * narrow
