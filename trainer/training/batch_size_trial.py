"""Whether a micro-batch fits into the memory that is really there: tried once, where its size was left open."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.activations.micro_batches import Stretch
from trainer.parallel.base import Parallel
from trainer.parallel.dry_run import rehearsed
from trainer.runtime.out_of_memory import hand_back, is_shortage
from trainer.training.learner import Learner

# Where so few do not fit, it is not they that take the memory.
LEAST_TOKENS = 64
# Read ahead, being moved, and summed in fp64 for the metrics.
BATCHES_BESIDE = 4
# Of the address space, by the threads that begin only then.
THREAD_BYTES = 2**27


def fits_everywhere(
    learners: Sequence[Learner], parallel: Parallel, sample: tuple[Tensor, Tensor], stretch: Stretch
) -> bool:
    """Whether all ranks can pass so many rows of a sample through every SAE; nothing of it is learnt.

    Only here do they meet: a rank that fails leaves nobody waiting in the middle of a pass.
    """
    failed = torch.zeros((), device=parallel.device)
    failed.fill_(not _fits(learners, sample, stretch))
    for learner in learners:
        learner.forget_pass()
    hand_back(parallel.device)
    parallel.world.sum_(failed)
    return not failed


def _fits(learners: Sequence[Learner], sample: tuple[Tensor, Tensor], stretch: Stretch) -> bool:
    try:
        x, y = _rows(sample, stretch.length)
        kept = _kept_beside(learners, x, y)
        for learner in learners:
            with rehearsed(learner.sae):
                learner.accumulate(x, y, stretch.of_all)
        del kept
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        return False
    return True


def _kept_beside(learners: Sequence[Learner], x: Tensor, y: Tensor) -> Tensor:
    """In the place of what a later step holds beside such a pass."""
    n_bytes = sum(learner.state_bytes for learner in learners) + BATCHES_BESIDE * (x.nbytes + y.nbytes)
    if x.device.type == "cpu":
        # How it finds the largest pre-activations depends on the data: at worst it makes all of them once more.
        of_pass = THREAD_BYTES + x.element_size() * len(x) * max(learner.sae.n_own for learner in learners)
        n_bytes += of_pass
        # Missed here and not within a product: there oneDNN takes memory without looking whether it got any.
        _empty(n_bytes + of_pass, x.device)
    return _empty(n_bytes, x.device)


def _empty(n_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def _rows(sample: tuple[Tensor, Tensor], n: int) -> tuple[Tensor, Tensor]:
    """So many inputs and targets, the same tensor where they are in the sample."""
    x, y = sample
    rows = torch.arange(n, device=x.device) % len(x)
    found = x[rows]
    return found, found if y is x else y[rows]
