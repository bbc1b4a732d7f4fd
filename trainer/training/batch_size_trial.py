"""Tries once whether a micro-batch fits into the memory that is really there, where its size was left open."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.activations.micro_batches import Stretch
from trainer.parallel.base import Parallel
from trainer.parallel.dry_run import dry_run
from trainer.runtime.out_of_memory import hand_back, is_shortage
from trainer.training.learner import Learner

# Where so few do not fit, smaller micro-batches would not help.
LEAST_TOKENS = 64
# Batches held beside a pass: read ahead, being moved, and summed in fp64 for the metrics.
BATCHES_BESIDE = 4
# Address space of the threads that begin only later.
THREAD_BYTES = 2**27


def fits_everywhere(
    learners: Sequence[Learner],
    parallel: Parallel,
    sample: tuple[Tensor, Tensor],
    stretch: Stretch,
    n_hooks: int = 1,
    kept_bytes: int = 0,
) -> bool:
    """Tell whether all ranks can pass their `stretch` of rows through every SAE; learn nothing from it.

    They are rows of the `sample`, whichever of the `n_hooks` in a batch an SAE is of. Beside them `kept_bytes` have to
    find room, which evaluations keep. Ranks wait for each other only after it: a rank that fails leaves nobody waiting
    in the middle of a pass.
    """
    failed = torch.zeros((), device=parallel.device)
    failed.fill_(not _fits(learners, sample, stretch, n_hooks, kept_bytes))
    for learner in learners:
        learner.forget_pass()
    hand_back(parallel.device)
    parallel.world.sum_(failed)
    return not failed


def _fits(
    learners: Sequence[Learner], sample: tuple[Tensor, Tensor], stretch: Stretch, n_hooks: int, kept_bytes: int
) -> bool:
    try:
        x, y = _rows(sample, stretch.length)
        reserve = _allocate_beside(learners, x, y, n_hooks, kept_bytes)
        for learner in learners:
            with dry_run(learner.sae):
                learner.accumulate(x, y, stretch.of_all)
        del reserve
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        return False
    return True


def _allocate_beside(learners: Sequence[Learner], x: Tensor, y: Tensor, n_hooks: int, kept_bytes: int) -> Tensor:
    """Allocate as much memory as a later step holds beside such a pass."""
    n_bytes = sum(learner.state_bytes for learner in learners) + n_hooks * BATCHES_BESIDE * (x.nbytes + y.nbytes)
    n_bytes += kept_bytes
    if x.device.type == "cpu":
        # How a CPU finds the largest pre-activations depends on the data: at worst it makes all of them once more.
        of_pass = THREAD_BYTES + x.element_size() * len(x) * max(learner.sae.n_own for learner in learners)
        n_bytes += of_pass
        # Where memory is short, fail here and not within a product: there oneDNN does not check whether it got any.
        _empty(n_bytes + of_pass, x.device)
    return _empty(n_bytes, x.device)


def _empty(n_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def _rows(sample: tuple[Tensor, Tensor], n: int) -> tuple[Tensor, Tensor]:
    """Return n inputs and targets, repeating the sample's where it has fewer; one tensor for both where it has one."""
    x, y = sample
    rows = torch.arange(n, device=x.device) % len(x)
    inputs = x[rows]
    return inputs, inputs if y is x else y[rows]
