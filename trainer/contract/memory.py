"""Bytes per GPU of a job, and on disk, from its settings alone (no torch)."""

from __future__ import annotations

import msgspec

from trainer.contract.catalog import ARCHITECTURES, OPTIMIZERS
from trainer.contract.config import members
from trainer.contract.job import JobConfig, Train

# The CUDA context with the libraries' own workspaces, and what the caching allocator cannot hand out again.
CUDA_CONTEXT_BYTES = 550 * 2**20
ALLOCATOR_SLACK = 0.10
# Bytes of a value that an optimizer remembers; int8 has a scale for every block beside it.
_STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.05}


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


def estimate(job: JobConfig, d_in: int, world_size: int, *, d_out: int | None = None, device: str = "cuda") -> Memory:
    """Bytes per rank on `world_size` ranks, for inputs of width `d_in` and a transcoder's targets of `d_out`.

    The SAEs of a sweep all keep their weights, gradients and optimizer; activations are those of the largest, for
    they pass through one after the other.
    """
    saes = list(members(job).values())
    weights = sum(4 * n_parameters(sae, d_in, d_out) for sae in saes)
    optimizer = sum(round(state_bytes(sae.train) * n_parameters(sae, d_in, d_out)) for sae in saes)
    activations = max(_activation_bytes(sae, d_in, d_out or d_in, device) for sae in saes)
    return Memory(
        weights=weights,
        gradients=weights,
        optimizer=optimizer,
        activations=activations + round(ALLOCATOR_SLACK * (activations + 2 * weights + optimizer)),
        communication=weights if job.mode(world_size) == "ddp" else 0,
        context=CUDA_CONTEXT_BYTES if device == "cuda" else 0,
    )


def on_disk(job: JobConfig, d_in: int, d_out: int | None = None) -> int:
    """Bytes of the checkpoints at their most, the newest, the best and one being written, and of the finished SAEs."""
    n_checkpoints = job.train.keep_checkpoints + 2
    return sum(
        round((n_checkpoints * (4 + state_bytes(sae.train)) + 4) * n_parameters(sae, d_in, d_out))
        for sae in members(job).values()
    )


def n_parameters(sae: JobConfig, d_in: int, d_out: int | None = None) -> int:
    """Encoder, decoder and their biases; the few vectors that some architectures add do not count."""
    d_sae, d_out = sae.sae.width(d_in), d_out or d_in
    return d_in * d_sae + d_sae * d_out + d_sae + d_out


def state_bytes(train: Train) -> float:
    """What the optimizer remembers for each weight, in bytes."""
    kept_as = getattr(train.knobs, "state", "fp32")
    return OPTIMIZERS[train.optimizer].state_values * _STATE_BYTES[kept_as]


def _activation_bytes(job: JobConfig, d_in: int, d_out: int, device: str) -> int:
    """Of one micro-batch, forward and backward."""
    narrow = job.train.precision in ("bf16", "fp16") or (job.train.precision == "auto" and device == "cuda")
    product = 2 if narrow else 4
    n_tokens, d_sae = job.train.batch_size, job.sae.width(d_in)
    dense = ARCHITECTURES[job.sae.architecture].dense_matrices if device == "cuda" else 0
    # Beside pre-activations that are chosen from lies a mask or a part of them: 1.1 (TopK) to 1.5 times as much.
    latents = n_tokens * d_sae * (4 * dense or product * 3 // 2)
    # What is as wide as the data: a batch in several stages, AuxK's 2 · k_aux = d_in candidates in three, and what
    # every level of a Matryoshka adds, its error and its gradient.
    n_levels = getattr(job.sae.knobs, "n_levels", 0)
    beside = n_tokens * 4 * (4 * d_in + 4 * d_out + 3 * d_in + 3 * n_levels * d_out)
    # A product in 16 bits reads its weights from a copy.
    copies = 2 * d_sae * (d_in + d_out) if narrow else 0
    return latents + beside + copies
