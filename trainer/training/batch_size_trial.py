"""Tests whether a micro-batch fits in the available memory, for jobs with an automatic batch size."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.activations.micro_batches import TokenSlice
from trainer.contract.machine_memory import available_bytes
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group, local_shard
from trainer.parallel.latents import Latents
from trainer.runtime.out_of_memory import hand_back, is_shortage
from trainer.training.layers import Layers, trained_together
from trainer.training.learner import Learner

# If a micro-batch of this size does not fit, a smaller micro-batch would not fit either.
LEAST_TOKENS = 64
# The number of batches in memory besides the one being processed: read ahead, in transfer, and in the metrics' fp64
# sums.
BATCHES_BESIDE = 4
# A pass on a CPU takes less than this multiple of the allocated memory. Skipping the pass saves about 0.4 s of CPU
# time at the start of a small job.
AMPLE = 20
# The address space, in bytes, of threads that start later.
THREAD_BYTES = 2**27


def fits_everywhere(
    learners: Sequence[Learner],
    parallel: Parallel,
    sample: tuple[Tensor, Tensor],
    token_slice: TokenSlice,
    n_hooks: int = 1,
    kept_bytes: int = 0,
) -> bool:
    """Return whether every rank has enough memory to pass its `token_slice` of rows through every SAE.

    The gradients from the pass are discarded. Every SAE gets rows from the same `sample`, even if the SAE trains on
    another of the `n_hooks` hooks. The `kept_bytes` of rows kept for evaluations must fit as well. Ranks synchronise
    only after the pass, so that no rank is left waiting mid-pass for a failed rank.
    """
    failed = torch.zeros((), device=parallel.device)
    failed.fill_(not _fits(learners, sample, token_slice, n_hooks, kept_bytes))
    for learner in learners:
        learner.forget_pass()
    hand_back(parallel.device)
    parallel.world.sum_(failed)
    return not failed


def _fits(
    learners: Sequence[Learner], sample: tuple[Tensor, Tensor], token_slice: TokenSlice, n_hooks: int, kept_bytes: int
) -> bool:
    try:
        x, y = _rows(sample, token_slice.length)
        reserve = _allocate_with_learners(learners, x, y, n_hooks, kept_bytes)
        if x.device.type == "cpu" and _is_little(len(reserve)):
            return True
        for unit in trained_together(learners):
            with contextlib.ExitStack() as dry:
                for learner in learners if isinstance(unit, Layers) else [unit]:
                    dry.enter_context(dry_run(learner.sae))
                unit.accumulate(x, y, token_slice.of_all)
        del reserve
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        return False
    return True


def _allocate_with_learners(learners: Sequence[Learner], x: Tensor, y: Tensor, n_hooks: int, kept_bytes: int) -> Tensor:
    """Allocate the memory that later steps need in addition to the memory that the pass uses."""
    n_bytes = sum(learner.state_bytes for learner in learners) + n_hooks * BATCHES_BESIDE * (x.nbytes + y.nbytes)
    n_bytes += kept_bytes
    if x.device.type == "cpu":
        # On a CPU, the memory for top-k depends on the data: in the worst case, top-k copies all pre-activations.
        of_pass = THREAD_BYTES + x.element_size() * len(x) * max(learner.sae.n_own for learner in learners)
        n_bytes += of_pass
        # Fail here if memory is short, since oneDNN does not check its allocations within a matmul.
        _empty(n_bytes + of_pass, x.device)
    return _empty(n_bytes, x.device)


def _is_little(n_bytes: int) -> bool:
    """Return whether a host has `AMPLE` times this memory available, so that a pass certainly fits."""
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return not is_limited and AMPLE * n_bytes < available_bytes()


def _empty(n_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def _rows(sample: tuple[Tensor, Tensor], n: int) -> tuple[Tensor, Tensor]:
    """Return n inputs and targets, repeating rows of the sample if needed; the targets are the inputs if y is x."""
    x, y = sample
    rows = torch.arange(n, device=x.device) % len(x)
    inputs = x[rows]
    return inputs, inputs if y is x else y[rows]


class _Echo(Group):
    """A stand-in for a group: it does not communicate, but allocates the memory that communication would need.

    Values from other ranks are replaced by the lowest possible values. Top-k then selects values from this rank only,
    the worst case for its memory use.
    """

    def __init__(self, group: Group) -> None:
        self.size, self.index = group.size, group.index

    def gather(self, tensor: Tensor) -> Tensor:
        # Clone the tensor, since a real transfer receives the tensors of all ranks in a separate buffer.
        return self._pad_with_lowest(tensor).clone()

    def to_owners(self, tensor: Tensor) -> Tensor:
        return self._pad_with_lowest(local_shard(tensor, self))

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        """Repeat this rank's results in place of the other owners' results; use ones if this rank owns no rows.

        Bounds from other owners are also replaced by the lowest possible values.
        """
        if tensor.is_floating_point():
            bounds = tensor.new_full((n_rows, *tensor.shape[2:]), -torch.inf)
            local_shard(bounds, self).copy_(tensor[self.index])
            return bounds
        own = tensor[self.index] if tensor.shape[1] else tensor.new_ones(1, *tensor.shape[2:])
        return own[torch.arange(n_rows, device=own.device) % len(own)]

    def _pad_with_lowest(self, own: Tensor) -> Tensor:
        gathered = own.new_full((self.size, *own.shape), -torch.inf if own.is_floating_point() else 0)
        gathered[self.index] = own
        return gathered


class _ExchangingPart(Protocol):
    """The SAE attributes that a dry run replaces."""

    data: Group
    peers: Group
    latents: Latents
    dead_after_tokens: int


@contextlib.contextmanager
def dry_run(sae: _ExchangingPart) -> Iterator[None]:
    """Within the context, replace an SAE's groups with `_Echo` groups, and treat all its latents as dead.

    Dead latents need extra memory, which would otherwise not be allocated until later in the run.
    """
    real, dead_after_tokens = (sae.data, sae.peers, sae.latents.group), sae.dead_after_tokens
    sae.data, sae.peers, sae.latents.group = (_Echo(group) if group.size > 1 else group for group in real)
    sae.dead_after_tokens = 0
    try:
        yield
    finally:
        sae.data, sae.peers, sae.latents.group = real
        sae.dead_after_tokens = dead_after_tokens
