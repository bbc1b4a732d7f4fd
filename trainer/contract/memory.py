"""Bytes per GPU of a job, and on disk, from its settings alone (no torch).

What a step takes beside weights and optimizer is the largest of a few phases, each a sum of the tensors that live in
it. The sums were read off torch's own count of the real step, and the tests compare them with it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trainer.contract.catalog import ARCHITECTURES, OPTIMIZERS
from trainer.contract.config import deals_steps, dealt_members, members, steps_alone
from trainer.contract.job import JobConfig, Train

# The CUDA context with the libraries' own workspaces, and what the caching allocator cannot hand out again.
CUDA_CONTEXT_BYTES = 550 * 2**20
ALLOCATOR_SLACK = 0.10
# Bytes of a value that an optimizer remembers; int8 has a scale for every block beside it.
_STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.05}
# A candidate that is sent, of which there are so many for each that is chosen (`trainer.saes.kernels.exchange`).
_MARGIN = 4
# Of fp32 numbers unpacked at a time (`trainer.optimizers.tiled`).
_TILE_BYTES = 4 * 2**23


class Memory(msgspec.Struct, frozen=True):
    """What one rank holds at the peak of a step, in bytes; the parts add up to the total.

    Most activations are gone when gradients come, so that one part of memory serves both: `activations` is what the
    peak takes beyond the gradients and what is exchanged.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    communication: int
    slack: int
    context: int

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


def estimate(job: JobConfig, d_in: int, world_size: int, *, d_out: int | None = None, device: str = "cuda") -> Memory:
    """Bytes per rank on `world_size` ranks, for inputs of width `d_in` and a transcoder's targets of `d_out`.

    The SAEs of a sweep all keep their weights, gradients and optimizer; activations are those of the one that takes
    most, for they pass through one after the other.
    """
    of_ranks = [list(saes.values()) for saes in dealt_members(job, world_size)]
    found = [_estimate_of(job, saes, d_in, world_size, d_out, device) for saes in of_ranks if saes]
    return max(found, key=lambda memory: memory.total)


def _estimate_of(
    job: JobConfig, saes: list[JobConfig], d_in: int, world_size: int, d_out: int | None, device: str
) -> Memory:
    share = 1 / job.latent_ranks(world_size)
    weights = [round(4 * share * n_parameters(sae, d_in, d_out)) for sae in saes]
    stepped = [own / _sharing_steps(sae, world_size) for sae, own in zip(saes, weights, strict=True)]
    optimizer = sum(round(state_bytes(sae.train) * own / 4) for sae, own in zip(saes, stepped, strict=True))
    # Gradients of the others are there while one passes; its own only from the second micro-batch on.
    peaks = [
        _peak(sae, d_in, d_out, world_size, device) + sum(weights) - own * (sae.micro_batches(world_size) == 1)
        for sae, own in zip(saes, weights, strict=True)
    ]
    updates = [_update_bytes(sae, own) for sae, own in zip(saes, stepped, strict=True)]
    peak = max(*peaks, sum(weights) + max(updates))
    exchanged = max(_exchanged_bytes(sae, d_in, d_out, world_size, device) for sae in saes)
    communication = min(exchanged, peak - sum(weights))
    return Memory(
        weights=sum(weights),
        gradients=sum(weights),
        optimizer=optimizer,
        activations=peak - sum(weights) - communication,
        communication=communication,
        slack=round(ALLOCATOR_SLACK * (sum(weights) + optimizer + peak)) if device == "cuda" else 0,
        context=CUDA_CONTEXT_BYTES if device == "cuda" else 0,
    )


def _sharing_steps(job: JobConfig, world_size: int) -> int:
    """How many replicas share the optimizer's states of an SAE; 1 where each has all."""
    return job.data_ranks(world_size) if deals_steps(job) else 1


def remedies(job: JobConfig, d_in: int, world_size: int, free_bytes: int, d_out: int | None = None) -> list[str]:
    """Changes of one setting each, as `section.key = value`, with which the job would fit into so many bytes."""
    now = job.micro_batch(world_size)
    halves = [now >> power for power in range(1, 8) if now >> power >= 64]
    changes: list[tuple[str, str, Any]] = [("train", "precision", "bf16"), ("parallel", "mode", "tensor")]
    changes += [("train", "batch_size", size) for size in halves]
    found: dict[str, str] = {}
    for section, key, value in changes:
        if key == "mode" and not _can_share(job, d_in, world_size):
            continue
        changed = job.replace(section, **{key: value})
        if key not in found and estimate(changed, d_in, world_size, d_out=d_out).total <= free_bytes:
            found[key] = f"{section}.{key} = {value}" if key == "batch_size" else f'{section}.{key} = "{value}"'
    return list(found.values())


def _can_share(job: JobConfig, d_in: int, world_size: int) -> bool:
    narrowest = min(sae.sae.width(d_in) for sae in members(job).values())
    return 1 < world_size <= narrowest and steps_alone(job)


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


def product_bytes(job: JobConfig, device: str) -> int:
    """Of a number in a matrix product."""
    narrow = job.train.precision in ("bf16", "fp16") or (job.train.precision == "auto" and device == "cuda")
    return 2 if narrow else 4


def _peak(job: JobConfig, d_in: int, d_out: int | None, world_size: int, device: str) -> int:
    """Of one micro-batch, forward and backward, with the gradients that come of it."""
    own = job.sae.width(d_in) / job.latent_ranks(world_size)
    if ARCHITECTURES[job.sae.architecture].dense_matrices and device == "cuda":
        exchanged = _exchanged_bytes(job, d_in, d_out, world_size, device)
        return round(_dense_peak(job, d_in, d_out, own, world_size, device)) + exchanged
    return round(_sparse_peak(job, d_in, d_out, own, world_size, device))


def _dense_peak(job: JobConfig, d_in: int, d_out: int | None, own: float, world_size: int, device: str) -> float:
    """Of those that go on with all pre-activations: in the middle of the backward pass."""
    entry, product = ARCHITECTURES[job.sae.architecture], product_bytes(job, device)
    batch = 4 * job.micro_batch(world_size)
    latents = batch * own
    # Data as it came, normalised, centred, and its error; a transcoder's target twice.
    rows = batch * (d_in * (2 + product / 4) + (d_out or d_in) + (2 * d_out if d_out else 0))
    gradient = own * (d_out or d_in) * 4
    late = own * (d_in + (d_out or d_in)) * 4 + gradient * entry.dense_weights
    return rows + max(
        entry.dense_matrices * latents + gradient * (1 + entry.dense_weights * product / 4),
        3 * latents + late,
    )


def _sparse_peak(job: JobConfig, d_in: int, d_out: int | None, own: float, world_size: int, device: str) -> float:
    """Of those that choose: at the encoder's product, at AuxK's, or where AuxK's gradients join the others."""
    product, n_tokens = product_bytes(job, device), job.micro_batch(world_size)
    knobs: Any = job.sae.knobs
    width_out, n_levels = d_out or d_in, getattr(knobs, "n_levels", 0)
    targets = 2 * d_out if d_out else 0
    exchanged = _exchanged_bytes(job, d_in, d_out, world_size, device)
    entries = n_tokens * _most_chosen(job, d_in) * 8
    copies = own * 2 if product == 2 else 0
    rows = 4 * n_tokens * (d_in * (2 + product / 4) + targets)
    encode = rows + product * n_tokens * own + copies * d_in + max(4 * entries, exchanged)
    n_aux = _n_aux(job, d_in)
    n_candidates = min(2 * n_aux, job.sae.width(d_in))
    # A sum over ranks is in fp32, beside what is added.
    n_rows = 4 + (2 * n_levels or job.latent_ranks(world_size) > 1)
    wide = 4 * n_tokens * n_rows * width_out
    beside = n_tokens * (product * (2 * n_candidates + n_aux + d_in + width_out) + 8 * n_aux + 2 * n_aux)
    # Candidates are exchanged before they are put to use.
    beside = max(beside, exchanged)
    explain = rows + wide + beside + product * n_candidates * (d_in + width_out) + copies * width_out + 4 * entries
    weights = 4 * own * (d_in + width_out)
    # AuxK's gradient of each matrix is as large as the other one, and both as their sum.
    beside_joined = 4 * n_tokens * (2 * d_in + width_out + targets)
    levels = copies * width_out + n_tokens * n_levels * width_out * (4 + product)
    joined = beside_joined + max(2 * weights, weights + 4 * own * width_out + levels)
    if not getattr(knobs, "auxk_alpha", 0.0):
        explain, joined = rows + wide + 4 * entries, weights
    return float(max(encode, explain, joined))


def _update_bytes(job: JobConfig, stepped: float) -> int:
    """What the optimizer needs beside its state; moments that are stored in less than fp32 are unpacked by tiles."""
    tiles = 6 * min(_TILE_BYTES, stepped / 2) if getattr(job.train.knobs, "state", "fp32") != "fp32" else 0
    return round(OPTIMIZERS[job.train.optimizer].scratch * stepped / 2 + tiles)


def _exchanged_bytes(job: JobConfig, d_in: int, d_out: int | None, world_size: int, device: str) -> int:
    """Candidates of everybody, twice and marked, and the sum of reconstructions; gradients are added in place."""
    sharing, n_tokens, k = job.latent_ranks(world_size), job.micro_batch(world_size), _most_chosen(job, d_in)
    if sharing == 1 and job.data_ranks(world_size) > 1 and ARCHITECTURES[job.sae.architecture].per_batch:
        # The choice among them has places of 8 bytes.
        return round(n_tokens * k * job.data_ranks(world_size) * (1.5 * (2 * product_bytes(job, device) + 1) + 8))
    if sharing == 1:
        return 0
    chooses = not ARCHITECTURES[job.sae.architecture].dense_matrices
    n_sums = max(1, getattr(job.sae.knobs, "n_levels", 0))
    of_token = candidates_of_token(job, d_in, sharing)
    if chooses and getattr(job.sae.knobs, "auxk_alpha", None):
        of_token = max(of_token, _n_aux(job, d_in))
    sent = of_token * sharing * n_tokens if chooses else 0
    return sent * (2 * product_bytes(job, device) + 1) + 4 * n_tokens * n_sums * (d_out or d_in)


def candidates_of_token(job: JobConfig, d_in: int, sharing: int) -> int:
    """What each of so many ranks sends for a token, where ranks share the latents and choose among all."""
    k = 0 if ARCHITECTURES[job.sae.architecture].dense_matrices else _most_chosen(job, d_in)
    return min(k, -(-_MARGIN * k // sharing))


def _most_chosen(job: JobConfig, d_in: int) -> int:
    """Latents per token, at the start of the run where they become fewer."""
    knobs: Any = job.sae.knobs
    k = getattr(knobs, "k", 0)
    return max(k, knobs.k_anneal_start or d_in) if getattr(knobs, "k_anneal_fraction", 0.0) else k


def _n_aux(job: JobConfig, d_in: int) -> int:
    return min(getattr(job.sae.knobs, "k_aux", None) or max(1, d_in // 2), job.sae.width(d_in))
