"""Training steps of an SAE with which no other rank has to do."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.activations.batches import Batch
from trainer.parallel.base import Parallel
from trainer.training.learner import Learner
from trainer.training.step import take_step

ALONE = Parallel(torch.device("cpu"))


def take_alone(learner: Learner, number: int, x: Tensor, y: Tensor | None = None) -> None:
    """Take step `number` on one batch of raw data; without targets `y` it is an SAE's."""
    take_step([learner], ALONE, number, [Batch([(x, x if y is None else y)], len(x))])
