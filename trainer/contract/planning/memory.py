"""Bytes per GPU and on disk of a job, from its settings alone (no torch).

What a pass takes beside weights and optimizer was derived from torch's own memory statistics of the real step, with
which the tests compare it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trainer.contract.planning import activation_memory, recorded_steps
from trainer.contract.planning.hardware import has_nvlink
from trainer.contract.planning.rows_on_gpu import bytes_of_rows
from trainer.contract.planning.workload import ONE_PROCESS, Workload
from trainer.contract.settings.catalog import ARCHITECTURES, OPTIMIZERS
from trainer.contract.settings.job import JobConfig, Sae, Train

# The CUDA context with the kernels that are loaded.
CUDA_CONTEXT_BYTES = 550 * 2**20
# A process on the CPU with Python, PyTorch and what else it loads, before any tensor (PyTorch 2.13: 570 to 595 MiB).
PROCESS_BYTES = 570 * 2**20
# What the allocator holds beyond a step's tensors, with segments that grow: holes between those that last, and what is
# left of the last pages of 20 MiB. Holes were 1 to 24 % of the tensors on an H200, and in 324 simulated steps 11.4 % in
# the middle, which is taken, and 27 % in one of twenty. Sizes do not tell: they hang on where the first update finds
# room for its state and on whether the largest tensors of later steps fit in between.
ALLOCATOR_SLACK, PAGES_BYTES = 0.114, 2 * 20 * 2**20
# cuBLAS sets memory aside for each thread and stream that multiplies, as much as `cuda_variables` asks for: the forward
# pass has a thread, and the backward pass one of its own. A recorded step has a stream of its own.
WORKSPACE_BYTES = 2 * 2**25
# NCCL's buffers for each GPU, outside PyTorch's memory. Over NVLink, 8 H100 took 1.06 GB for sums and gathers and 4.34
# GB once all pairs had exchanged (NVIDIA/nccl #1685); 4 A100 took 0.54 to 0.69 GB for a group without pairs (#964).
# Over PCIe NCCL opens few channels.
_NVLINK_BYTES, _NVLINK_PAIR_BYTES, _PCIE_BYTES = 1_060 * 10**6, 470 * 10**6, 300 * 10**6
# Fewer GPUs have no switch between them, and fewer channels.
_SWITCHED_FROM = 4
# Bytes of one value of optimizer state; int8 also stores a scale for every block.
_STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.05}


class Memory(msgspec.Struct, frozen=True):
    """What one rank holds at the peak of a step, in bytes; the parts add up to the total.

    Most activations are freed by the time gradients are made, so both use the same memory: `activations` is what the
    peak needs beyond the gradients and the exchange buffers. `communication` also counts NCCL's buffers; `slack` is
    what the allocator cannot hand out again, cuBLAS' workspaces, what evaluations need beyond a step, and rows beside
    those of a step.
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


def estimate(work: Workload) -> Memory:
    """Return the bytes of the fullest rank.

    All SAEs of a sweep keep their weights, gradients and optimizer state; activations are those of the SAE that needs
    most, since they run one after the other.
    """
    return _fullest(work, is_compiled=False)


def of_plain_steps(work: Workload, *, is_compiled: bool) -> int:
    """Return the bytes that a GPU reserves for steps alone: with given rows, not recorded, and without evaluations.

    An update that `is_compiled` needs none beside its state, unless it multiplies matrices.
    """
    whole = _fullest(work, is_compiled=is_compiled)
    taken = whole.total - outside_pytorch(work) - whole.slack
    return taken + _of_allocator(taken)


def _fullest(work: Workload, *, is_compiled: bool) -> Memory:
    of_ranks = [list(saes.values()) for saes in work.members_by_rank]
    # Under every mode but "sweep" the ranks hold the same.
    some = [saes for saes in (of_ranks if work.mode == "sweep" else of_ranks[:1]) if saes]
    estimates = [_estimate_of(work, saes, is_compiled=is_compiled) for saes in some]
    return max(estimates, key=lambda memory: memory.total)


def _estimate_of(work: Workload, saes: list[JobConfig], *, is_compiled: bool) -> Memory:
    weights = [round(4 * n_parameters(work, one.sae, work.latent_ranks)) for one in saes]
    stepped = [4 * n_parameters(work, one.sae, work.latent_ranks * _sharing_steps(work, one.train)) for one in saes]
    # Replicas that exchange copies hold the fp32 weights that they step; all of them at the start and in evaluations.
    held_weights = [
        round(own) if activation_memory.exchanges_copies(work, one) else whole
        for one, own, whole in zip(saes, stepped, weights, strict=True)
    ]
    restored = sum(weights) - sum(held_weights)
    optimizer = sum(
        round(state_bytes(one.train, work.device) * own / 4) for one, own in zip(saes, stepped, strict=True)
    )
    # During an SAE's pass the gradients of all others exist; its own only from the second micro-batch on.
    held = [sum(weights) - own * (work.micro_batches == 1) for own in weights]
    copies = [activation_memory.kept_copies(work, one) for one in saes]
    passes = [
        activation_memory.of_pass(work, one.sae, keeps_copies=kept > 0) for one, kept in zip(saes, copies, strict=True)
    ]
    highest = [during + gradients for during, gradients in zip(passes, held, strict=True)]
    updates = [_update_bytes(one.train, own, is_compiled=is_compiled) for one, own in zip(saes, stepped, strict=True)]
    starts = [activation_memory.of_start(work, one.sae) for one in saes]
    peak = max(*highest, sum(weights) + max(updates), restored + max(starts)) + sum(copies)
    exchanged = max(activation_memory.exchanged_bytes(work, one.sae) for one in saes)
    communication = min(exchanged, peak - sum(weights))
    n_hooks = len(work.job.hooks)
    source = work.job.data.knobs.held(n_hooks * work.shape.width, on_cuda=work.device == "cuda")
    # During the pass of an SAE at one hook, a batch has the rows of all others too.
    beside = 4 * work.micro_batch * work.shape.width * (n_hooks - 1)
    taken = sum(held_weights) + optimizer + peak + beside + sum(source)
    on_cuda = work.device == "cuda"
    beside_steps = _beside_steps(work, saes, peak - sum(copies) - restored) + bytes_of_rows(work) if on_cuda else 0
    return Memory(
        weights=sum(held_weights) + source.weights,
        gradients=sum(weights),
        optimizer=optimizer,
        activations=peak - sum(weights) - communication + beside + source.activations,
        communication=communication + nccl_bytes(work),
        slack=_of_allocator(taken) + beside_steps if on_cuda else 0,
        context=context_bytes(work.device),
    )


def _of_allocator(taken: int) -> int:
    """Return the bytes that a GPU's allocator reserves beyond the tensors that it is asked for."""
    return round(ALLOCATOR_SLACK * taken) + PAGES_BYTES + WORKSPACE_BYTES


def _beside_steps(work: Workload, saes: list[JobConfig], of_step: int) -> int:
    """Return the bytes that evaluations need beyond a step's own, `of_step`, which it gives back before them.

    A recorded step keeps them for its replays. What plain steps had of the allocator is given back to record one.
    """
    evaluated = max(activation_memory.of_evaluation(work, one) for one in saes)
    if not recorded_steps.pays(work, work.d_in, work.d_out, precision=work.precision):
        return max(0, evaluated - of_step)
    (alone,) = saes
    recorded = of_step
    if ARCHITECTURES[alone.sae.architecture].dense_matrices:
        # Only its sparse products are recorded.
        copied = activation_memory.kept_copies(work, alone) > 0
        recorded = activation_memory.of_sparse_pass(work, alone.sae, keeps_copies=copied)
    return max(0, recorded + evaluated + WORKSPACE_BYTES - of_step)


def of_reader(work: Workload) -> Memory | None:
    """Return the bytes of a GPU that only runs a language model; None where no GPU does."""
    if not work.model_gpus:
        return None
    on_cuda = work.device == "cuda"
    held = work.job.data.knobs.held_alone(len(work.job.hooks) * work.shape.width, on_cuda=on_cuda)
    return Memory(
        weights=held.weights,
        gradients=0,
        optimizer=0,
        activations=held.activations,
        communication=0,
        slack=_of_allocator(sum(held)) if on_cuda else 0,
        context=context_bytes(work.device),
    )


def context_bytes(device: str) -> int:
    """Return a rank's bytes before any tensor: its CUDA context on a GPU, the process itself on the CPU."""
    return CUDA_CONTEXT_BYTES if device == "cuda" else PROCESS_BYTES


def outside_pytorch(work: Workload) -> int:
    """Return the bytes of a device that a rank takes and PyTorch does not count: its context and NCCL's buffers."""
    return context_bytes(work.device) + nccl_bytes(work)


def nccl_bytes(work: Workload) -> int:
    """Return the bytes that NCCL takes of each GPU for exchanges among all ranks, and in groups of a hybrid.

    Ranks open all connections as they meet, in every mode. Sums and gathers need one kind. Shared latents and the
    collection of checkpoints need another, between each pair of GPUs.
    """
    if work.device != "cuda" or work.ranks == 1 or work.mode in ONE_PROCESS:
        return 0
    groups = [work.ranks, work.latent_ranks, work.data_ranks] if work.mode == "hybrid" else [work.ranks]
    n_nodes = work.job.launch.nodes if work.job.cluster else 1
    return sum(_group_bytes(-(-size // n_nodes), has_nvlink(work.device_name)) for size in groups if size > 1)


def _group_bytes(n_gpus: int, by_nvlink: bool) -> int:
    """Return NCCL's bytes for a group that has this many GPUs on each host."""
    if not by_nvlink:
        return _PCIE_BYTES
    return (_NVLINK_BYTES if n_gpus >= _SWITCHED_FROM else _PCIE_BYTES) + (n_gpus - 1) * _NVLINK_PAIR_BYTES


def _sharing_steps(work: Workload, train: Train) -> int:
    """Return how many replicas share the optimizer state of an SAE; 1 where each holds all of it."""
    return work.data_ranks if work.uses_zero(train) else 1


def remedies(work: Workload, free_bytes: int) -> list[str]:
    """List changes of one setting, as `section.key = value`, each of which would make the job fit into `free_bytes`."""
    halves = [work.micro_batch >> power for power in range(1, 8) if work.micro_batch >> power >= 64]
    changes: list[tuple[str, str, Any]] = [("train", "precision", "bf16"), ("parallel", "mode", "tensor")]
    changes += [("train", "batch_size", size) for size in halves]
    fitting: dict[str, str] = {}
    for section, key, value in changes:
        if key == "mode" and not _can_share(work):
            continue
        if key not in fitting and estimate(work.with_settings(section, **{key: value})).total <= free_bytes:
            fitting[key] = f"{section}.{key} = {value}" if key == "batch_size" else f'{section}.{key} = "{value}"'
    return list(fitting.values())


def _can_share(work: Workload) -> bool:
    return 1 < work.ranks <= work.narrowest and work.is_elementwise


def on_disk(work: Workload) -> int:
    """Return the most bytes on disk: the newest checkpoints, the best, one being written, and the finished SAEs."""
    return (work.job.train.keep_checkpoints + 1) * checkpoint_bytes(work) + last_bytes(work)


def last_bytes(work: Workload) -> int:
    """Return the bytes on disk that the end of a run needs: its last checkpoint and the finished SAEs."""
    return checkpoint_bytes(work) + round(sum(4 * n_parameters(work, one.sae) for one in work.members.values()))


def checkpoint_bytes(work: Workload) -> int:
    """Return the bytes of a checkpoint: weights and optimizer state of all SAEs."""
    return round(
        sum((4 + state_bytes(one.train, work.device)) * n_parameters(work, one.sae) for one in work.members.values())
    )


def n_parameters(work: Workload, sae: Sae, parts: int = 1) -> float:
    """Count the parameters of encoder, decoder, biases and skip connection, with one of `parts` of the latents.

    A few vectors of some architectures are left out.
    """
    d_sae = sae.width(work.d_in)
    return (work.d_in * d_sae + d_sae * work.d_out + d_sae + work.d_out) / parts + n_skip(work, sae)


def n_skip(work: Workload, sae: Sae) -> int:
    """Count the parameters of a skip connection, which every rank has as a whole."""
    return work.d_in * work.d_out if sae.skip else 0


def state_bytes(train: Train, device: str) -> float:
    """Return the bytes of optimizer state for each weight on a kind of device, "cuda" or "cpu"."""
    return OPTIMIZERS[train.optimizer].state_values * _STATE_BYTES[train.knobs.state_dtype(device)]


def _update_bytes(train: Train, stepped: float, *, is_compiled: bool) -> int:
    """Return the bytes an update needs beside the state."""
    entry = OPTIMIZERS[train.optimizer]
    return 0 if is_compiled and entry.elementwise else round(entry.scratch * stepped / 2)
