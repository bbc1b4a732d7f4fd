"""Measures SAEs on held-out data, in the form in which they are exported."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trainer.activations.base import Pair
from trainer.activations.training_data import TrainingData
from trainer.metrics.base import Observation
from trainer.metrics.reconstruction import Fvu
from trainer.metrics.sparsity import L0
from trainer.parallel.base import Parallel
from trainer.parallel.group import own_part
from trainer.training.learner import Learner


@torch.no_grad()
def evaluate(
    learners: dict[str, Learner], data: TrainingData, parallel: Parallel, batch_size: int
) -> dict[str, dict[str, float]]:
    """Return `heldout_fvu` and `heldout_l0` of every learner by its label; each rank measures its share of the rows."""
    parts: dict[str, Tensor] = {}
    for label, learner in learners.items():
        fvu, l0 = _measure(learner, data.held_out(batch_size), parallel)
        parts |= {f"fvu@{label}": fvu, f"l0@{label}": l0}
    totals = parallel.sum_parts(parts, parallel.data)
    return {
        label: {
            "heldout_fvu": Fvu().value(totals[f"fvu@{label}"]),
            "heldout_l0": L0().value(totals[f"l0@{label}"]),
        }
        for label in learners
    }


def _measure(learner: Learner, batches: Iterable[Pair], parallel: Parallel) -> tuple[Tensor, Tensor]:
    sae, fvu, l0 = learner.sae, Fvu(), L0()
    with learner.evaluating():
        for batch in batches:
            x, y = (part.to(parallel.device).float() for part in batch)
            target = own_part(y, learner.latents.group) * sae.y_scale
            output = learner.forward(x * sae.x_scale, target)
            observation = Observation(target, output.x_hat, output.acts, sae.dead(), sae.y_mean)
            fvu.update(observation)
            l0.update(observation)
    return fvu.whole(fvu.sums(), learner.latents), l0.whole(l0.sums(), learner.latents)
