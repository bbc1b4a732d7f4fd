"""Helpers that take an SAE's training steps on a single rank."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.activations.batches import Batch
from trainer.parallel.base import Parallel
from trainer.training.learner import Learner, StepState
from trainer.training.step import take_step

ALONE = Parallel(torch.device("cpu"))


def take_alone(learner: Learner, number: int, x: Tensor, y: Tensor | None = None) -> None:
    """Take step `number` on a batch of raw data; `y` contains a transcoder's targets."""
    take_step([learner], ALONE, number, [Batch([(x, x if y is None else y)], len(x))])


def skips(learner: Learner) -> tuple[int, int, int]:
    """Return three counts of skipped steps: since the last call, consecutively, and because a buffer was full."""
    state = StepState.of(learner.take_state())
    return state.skipped, state.skipped_in_a_row, state.overflowed
