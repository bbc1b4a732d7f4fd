"""Tests whether a micro-batch fits into the available memory, for jobs with an automatic batch size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.activations.micro_batches import TokenSlice
from trainer.parallel.base import Parallel
from trainer.parallel.dry_run import dry_run
from trainer.runtime.out_of_memory import hand_back, is_shortage
from trainer.training.learner import Learner

# If a micro-batch of this size does not fit, a smaller one would not either.
LEAST_TOKENS = 64
# Batches held in memory in addition to the pass: read ahead, in transfer, and in fp64 sums for the metrics.
BATCHES_BESIDE = 4
# Address space of threads that start later.
THREAD_BYTES = 2**27


def fits_everywhere(
    learners: Sequence[Learner],
    parallel: Parallel,
    sample: tuple[Tensor, Tensor],
    token_slice: TokenSlice,
    n_hooks: int = 1,
    kept_bytes: int = 0,
) -> bool:
    """Return whether all ranks can run a pass on their `token_slice` of rows through every SAE; discard the gradients.

    Every SAE gets rows of the `sample`, whichever of the `n_hooks` hooks it trains on. `kept_bytes`, for the rows that
    evaluations keep, must fit as well. Ranks synchronise only afterwards, so a rank that fails leaves no other rank
    waiting in the middle of a pass.
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
        reserve = _allocate_beside(learners, x, y, n_hooks, kept_bytes)
        for learner in learners:
            with dry_run(learner.sae):
                learner.accumulate(x, y, token_slice.of_all)
        del reserve
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        return False
    return True


def _allocate_beside(learners: Sequence[Learner], x: Tensor, y: Tensor, n_hooks: int, kept_bytes: int) -> Tensor:
    """Allocate the memory that a later step needs in addition to the pass."""
    n_bytes = sum(learner.state_bytes for learner in learners) + n_hooks * BATCHES_BESIDE * (x.nbytes + y.nbytes)
    n_bytes += kept_bytes
    if x.device.type == "cpu":
        # The CPU's top-k algorithm depends on the data: at worst it copies all pre-activations.
        of_pass = THREAD_BYTES + x.element_size() * len(x) * max(learner.sae.n_own for learner in learners)
        n_bytes += of_pass
        # Fail here if memory is short: oneDNN does not check its allocations within a matrix product.
        _empty(n_bytes + of_pass, x.device)
    return _empty(n_bytes, x.device)


def _empty(n_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def _rows(sample: tuple[Tensor, Tensor], n: int) -> tuple[Tensor, Tensor]:
    """Return n inputs and targets, repeating rows of a smaller sample; the same tensor twice if the sample has one."""
    x, y = sample
    rows = torch.arange(n, device=x.device) % len(x)
    inputs = x[rows]
    return inputs, inputs if y is x else y[rows]
