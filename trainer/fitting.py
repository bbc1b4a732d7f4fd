"""Whether a micro-batch fits into the memory that is really there: tried once, where its size was left open."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.contract.catalog import ARCHITECTURES
from trainer.learner import Learner
from trainer.parallel.base import Parallel

# Read ahead, being moved, and summed in fp64 for the metrics.
BATCHES_BESIDE = 4


def can_try(learners: Sequence[Learner], parallel: Parallel) -> bool:
    """Not where a rank that fails would leave others waiting in the middle of a pass."""
    per_batch = any(ARCHITECTURES[learner.architecture].per_batch for learner in learners)
    return parallel.learns_alone or (parallel.latents.size == 1 and not per_batch)


def fits_everywhere(learners: Sequence[Learner], parallel: Parallel, x: Tensor, y: Tensor) -> bool:
    """Whether all ranks can pass these rows through every SAE; nothing of it is learnt."""
    failed = torch.tensor(float(not _fits(learners, x, y)))
    for learner in learners:
        learner.forget_pass()
    gc.collect()
    if parallel.device.type == "cuda":
        torch.cuda.empty_cache()
    failed = failed.to(parallel.device)
    parallel.world.sum_(failed)
    return not failed


def _fits(learners: Sequence[Learner], x: Tensor, y: Tensor) -> bool:
    try:
        # In the place of what a later step holds beside a pass.
        n_bytes = sum(learner.state_bytes for learner in learners) + BATCHES_BESIDE * (x.nbytes + y.nbytes)
        kept = torch.empty(n_bytes, dtype=torch.uint8, device=x.device)
        for learner in learners:
            learner.accumulate(x, y)
        del kept
    except (torch.OutOfMemoryError, MemoryError):
        # The latter is numpy's, among the largest activations.
        return False
    except RuntimeError as error:
        # What the CPU's allocator says has no type of its own.
        if "can't allocate memory" not in str(error):
            raise
        return False
    return True
