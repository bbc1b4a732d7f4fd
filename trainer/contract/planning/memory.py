"""Estimates the memory per GPU and the disk space that a job needs, from its settings alone, without importing torch.

The formulas for the memory used by a pass, without weights and optimizer state, were derived from torch's memory
statistics for real steps. Tests compare estimates with these statistics.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trainer.contract.planning import activation_memory, graph_capture
from trainer.contract.planning.halving import contests_of
from trainer.contract.planning.hardware import has_nvlink
from trainer.contract.planning.rows_on_gpu import bytes_of_rows
from trainer.contract.planning.workload import ONE_PROCESS, Workload
from trainer.contract.settings.catalog import ARCHITECTURES, OPTIMIZERS
from trainer.contract.settings.job import JobConfig, SaeSettings, Train

# The size of a CUDA context with the loaded kernels, in bytes.
CUDA_CONTEXT_BYTES = 550 * 2**20
# The memory in bytes that a CPU process with Python, PyTorch and other libraries uses before it allocates a tensor
# (PyTorch 2.13: 570 to 595 MiB).
PROCESS_BYTES = 570 * 2**20
# Memory that PyTorch's allocator reserves beyond a step's tensors, with expandable segments: holes between long-lived
# tensors, and the unused ends of the last 20 MiB pages. On an H200, holes added 1 to 24 % to the size of the tensors.
# In 324 simulated steps, the median was 11.4 % (the value used here), and the 95th percentile was 27 %. The size of the
# holes cannot be predicted from tensor sizes, because it depends on where the first update places its state, and on
# whether the largest tensors in later steps fit in between.
ALLOCATOR_SLACK, PAGES_BYTES = 0.114, 2 * 20 * 2**20
# cuBLAS reserves a workspace for each thread and stream that multiplies matrices; `cuda_variables` sets its size. The
# forward and the backward pass each run in their own thread, and CUDA-graph capture has its own stream.
WORKSPACE_BYTES = 2 * 2**25
# The size in bytes of NCCL's buffers on each GPU, which are not part of PyTorch's memory. Over NVLink, each of 8 H100
# GPUs used 1.06 GB for all-reduce and all-gather, and 4.34 GB after all pairs had exchanged data (NVIDIA/nccl #1685).
# Each of 4 A100 GPUs used 0.54 to 0.69 GB without pairwise exchanges (#964). Over PCIe, NCCL opens few channels.
_NVLINK_BYTES, _NVLINK_PAIR_BYTES, _PCIE_BYTES = 1_060 * 10**6, 470 * 10**6, 300 * 10**6
# GPUs in groups of this size or larger are connected by a switch; NCCL opens fewer channels in smaller groups.
_SWITCHED_FROM = 4
# The size of one value of optimizer state in bytes; int8 also stores a scale for each block of values.
_STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.05}


class Memory(msgspec.Struct, frozen=True):
    """The memory in bytes that one rank uses at the peak of a step, by purpose.

    Most activations are freed before gradients are allocated, so the two use the same memory. Therefore,
    `activations` is the part of the peak that exceeds the gradients and the exchange buffers. `communication` includes
    NCCL's buffers. `slack` includes memory lost to fragmentation, cuBLAS workspaces, extra memory for evaluations, and
    rows that are read ahead or cached.
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
    """Return the memory that the most demanding rank needs.

    All SAEs in a sweep, and the copies compared by `train.halving`, keep their weights, gradients and optimizer state.
    Only the largest SAE's activations are included because the SAEs are processed sequentially, except for the layers
    of a cross-layer transcoder.
    """
    return _fullest(work, is_compiled=False)


def of_plain_steps(work: Workload, *, is_compiled: bool) -> int:
    """Return the bytes that a GPU reserves for training steps, excluding CUDA graphs, evaluations and reading rows.

    A compiled update needs no temporary memory, unless it multiplies matrices.
    """
    whole = _fullest(work, is_compiled=is_compiled)
    taken = whole.total - outside_pytorch(work) - whole.slack
    return taken + _of_allocator(taken)


def _fullest(work: Workload, *, is_compiled: bool) -> Memory:
    copied = [work.members[label] for contest in contests_of(work) for labels in contest.values() for label in labels]
    of_ranks = [[*saes.values(), *copied] for saes in work.members_by_rank]
    # In every mode except "sweep", all ranks need the same memory.
    some = [saes for saes in (of_ranks if work.mode == "sweep" else of_ranks[:1]) if saes]
    estimates = [_estimate_of(work, saes, is_compiled=is_compiled) for saes in some]
    return max(estimates, key=lambda memory: memory.total)


def _estimate_of(work: Workload, saes: list[JobConfig], *, is_compiled: bool) -> Memory:
    weights = [round(4 * n_parameters(work, one.sae, work.latent_ranks)) for one in saes]
    stepped = [4 * n_parameters(work, one.sae, work.latent_ranks * _sharing_steps(work, one.train)) for one in saes]
    # Replicas that exchange 16-bit copies keep only the fp32 weights that they update, but need all weights at the
    # start and in evaluations.
    held_weights = [
        round(own) if activation_memory.exchanges_copies(work, one) else whole
        for one, own, whole in zip(saes, stepped, weights, strict=True)
    ]
    restored = sum(weights) - sum(held_weights)
    optimizer = sum(
        round(state_bytes(one.train, work.device) * own / 4) for one, own in zip(saes, stepped, strict=True)
    )
    # During an SAE's pass, the gradients of all other SAEs are in memory; its own gradients are in memory only from the
    # second micro-batch on.
    held = [sum(weights) - own * (work.micro_batches == 1) for own in weights]
    copies = [activation_memory.kept_copies(work, one) for one in saes]
    passes = [
        activation_memory.of_pass(work, one.sae, keeps_copies=kept > 0) for one, kept in zip(saes, copies, strict=True)
    ]
    highest = [during + gradients for during, gradients in zip(passes, held, strict=True)]
    if work.job.n_layers > 1:
        # All layers have the same settings, and only one backward pass.
        of_all = activation_memory.of_layers(work, saes[0].sae, keeps_copies=copies[0] > 0)
        highest = [of_all + sum(weights) * (work.micro_batches > 1)]
    updates = [_update_bytes(one.train, own, is_compiled=is_compiled) for one, own in zip(saes, stepped, strict=True)]
    starts = [activation_memory.of_start(work, one.sae) for one in saes]
    peak = max(*highest, sum(weights) + max(updates), restored + max(starts)) + sum(copies)
    exchanged = max(activation_memory.exchanged_bytes(work, one.sae) for one in saes)
    communication = min(exchanged, peak - sum(weights))
    n_hooks = len(work.job.hooks)
    source = work.job.data.settings.held(n_hooks * work.shape.width, on_cuda=work.device == "cuda")
    # During the pass of an SAE at one hook, the rows for all other hooks are also in memory.
    beside = 4 * work.micro_batch * work.shape.width * (n_hooks - 1) * (work.job.n_layers == 1)
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
    """Return the bytes that a GPU's allocator reserves beyond the requested tensors."""
    return round(ALLOCATOR_SLACK * taken) + PAGES_BYTES + WORKSPACE_BYTES


def _beside_steps(work: Workload, saes: list[JobConfig], of_step: int) -> int:
    """Return how many bytes evaluations need beyond the `of_step` bytes of a step, which are freed first.

    A step captured as a CUDA graph keeps its memory for replays. The memory used by eager steps is freed before the
    capture.
    """
    evaluated = max(activation_memory.of_evaluation(work, one) for one in saes)
    if not graph_capture.pays(work, work.d_in, work.d_out, precision=work.precision):
        return max(0, evaluated - of_step)
    (alone,) = saes
    recorded = of_step
    if ARCHITECTURES[alone.sae.architecture].dense_matrices:
        # Only the sparse matmuls are captured.
        copied = activation_memory.kept_copies(work, alone) > 0
        recorded = activation_memory.of_sparse_pass(work, alone.sae, keeps_copies=copied)
    return max(0, recorded + evaluated + WORKSPACE_BYTES - of_step)


def of_reader(work: Workload) -> Memory | None:
    """Return the memory that a GPU needs if it only runs a language model, or None if there is no such GPU."""
    if not work.model_gpus:
        return None
    on_cuda = work.device == "cuda"
    held = work.job.data.settings.held_alone(len(work.job.hooks) * work.shape.width, on_cuda=on_cuda)
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
    """Return the bytes that a rank uses before it allocates a tensor: its CUDA context or, on the CPU, its process."""
    return CUDA_CONTEXT_BYTES if device == "cuda" else PROCESS_BYTES


def outside_pytorch(work: Workload) -> int:
    """Return the bytes that a rank uses outside PyTorch's statistics: its context and NCCL's buffers."""
    return context_bytes(work.device) + nccl_bytes(work)


def nccl_bytes(work: Workload) -> int:
    """Return the bytes that NCCL uses on each GPU to connect all ranks and, in "hybrid" mode, groups of ranks.

    In every mode, ranks open all connections at startup. All-reduce and all-gather need one type of connection. Shared
    latents and checkpoints need a second type, between each pair of GPUs.
    """
    if work.device != "cuda" or work.ranks == 1 or work.mode in ONE_PROCESS:
        return 0
    groups = [work.ranks, work.latent_ranks, work.data_ranks] if work.mode == "hybrid" else [work.ranks]
    n_nodes = work.job.launch.nodes if work.job.cluster else 1
    return sum(_group_bytes(-(-size // n_nodes), has_nvlink(work.device_name)) for size in groups if size > 1)


def _group_bytes(n_gpus: int, by_nvlink: bool) -> int:
    """Return the size of NCCL's buffers in bytes for a group with `n_gpus` GPUs per host."""
    if not by_nvlink:
        return _PCIE_BYTES
    return (_NVLINK_BYTES if n_gpus >= _SWITCHED_FROM else _PCIE_BYTES) + (n_gpus - 1) * _NVLINK_PAIR_BYTES


def _sharing_steps(work: Workload, train: Train) -> int:
    """Return the number of replicas sharding an SAE's optimizer state; 1 if each replica holds the full state."""
    return work.data_ranks if work.uses_zero(train) else 1


def remedies(work: Workload, free_bytes: int) -> list[str]:
    """Return changes to individual settings, such as `train.batch_size = 512`, each of which makes the job fit.

    The job fits if it needs at most `free_bytes`.
    """
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
    """Return the maximum disk usage in bytes: the kept checkpoints, the one being written and the finished SAEs."""
    return (work.job.train.keep_checkpoints + 1) * checkpoint_bytes(work) + last_bytes(work)


def last_bytes(work: Workload) -> int:
    """Return the disk space in bytes needed at the end of a run, for its last checkpoint and the finished SAEs."""
    return checkpoint_bytes(work) + round(sum(4 * n_parameters(work, one.sae) for one in work.members.values()))


def checkpoint_bytes(work: Workload) -> int:
    """Return the size of a checkpoint in bytes: the weights and optimizer state of all SAEs."""
    return round(
        sum((4 + state_bytes(one.train, work.device)) * n_parameters(work, one.sae) for one in work.members.values())
    )


def n_parameters(work: Workload, sae: SaeSettings, parts: int = 1) -> float:
    """Return the number of encoder, decoder and bias parameters in one of `parts` shards of the latents.

    For a cross-layer transcoder, this is the mean over its layers. The count includes skip-connection parameters, but
    not a few vectors in some architectures.
    """
    d_sae = sae.width(work.d_in)
    return (work.d_in * d_sae + d_sae * work.written_width + d_sae + work.d_out) / parts + n_skip(work, sae)


def n_skip(work: Workload, sae: SaeSettings) -> int:
    """Return the number of parameters in the skip connection, which is replicated on every rank."""
    return work.d_in * work.d_out if sae.skip else 0


def state_bytes(train: Train, device: str) -> float:
    """Return the size in bytes of the optimizer state per weight on a device of type "cuda" or "cpu"."""
    return OPTIMIZERS[train.optimizer].state_values * _STATE_BYTES[train.settings.state_dtype(device)]


def _update_bytes(train: Train, stepped: float, *, is_compiled: bool) -> int:
    """Return the size in bytes of the temporary tensors in an optimizer update."""
    entry = OPTIMIZERS[train.optimizer]
    return 0 if is_compiled and entry.elementwise else round(entry.scratch * stepped / 2)
