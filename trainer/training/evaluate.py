"""Measures SAEs on held-out data, in the form used for export."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trainer.activations.base import Pair
from trainer.activations.training_data import HALVES
from trainer.contract.planning.rows_on_gpu import MOST_TOKENS
from trainer.contract.settings.series import held_out, held_out_metrics
from trainer.metrics.base import Observation
from trainer.metrics.interval import Interval
from trainer.parallel.base import Parallel
from trainer.training.held_out import HeldOut
from trainer.training.learner import Learner
from trainer.training.sharded_state import under
from trainer.training.thresholds import set_thresholds

# The maximum number of values in a batch. Before PyTorch 2.7, `nonzero` on a GPU failed for larger matrices.
MOST_VALUES = 2**31 - 1


@torch.no_grad()
def evaluate(
    learners: dict[str, Learner], held_out_rows: HeldOut, parallel: Parallel, batch_size: int
) -> dict[str, dict[str, float]]:
    """Fit thresholds on held-out rows, and return a dict mapping each learner's label to its held-out metrics.

    Each rank evaluates its share of the rows.
    """
    set_thresholds(learners, held_out_rows, parallel, batch_size)
    measured = {label: Interval(entries=held_out_metrics()) for label in learners}
    parts: dict[str, Tensor] = {}
    for label, learner in learners.items():
        batch_of_sae = min(batch_size, most_tokens(learner.sae.d_sae))
        for half in HALVES:
            with learner.sae.measuring_half(half):
                _measure(learner, held_out_rows.batches(learner.hook, batch_of_sae, half), measured[label])
        parts |= {f"{label}/{name}": sums for name, sums in measured[label].sums(learner.latents).items()}
    totals = parallel.sum_parts(parts, parallel.data)
    values = {label: one.values(under(totals, f"{label}/")) for label, one in measured.items()}
    return {label: {held_out(name): value for name, value in of_sae.items()} for label, of_sae in values.items()}


def most_tokens(d_sae: int) -> int:
    """Return the largest evaluation batch, in tokens, for an SAE with `d_sae` latents in total."""
    return min(MOST_TOKENS, max(1, MOST_VALUES // d_sae))


def _measure(learner: Learner, batches: Iterable[Pair], measured: Interval) -> None:
    """Add the metrics for this rank's rows to `measured`."""
    sae = learner.sae
    with learner.evaluating():
        for x, y in batches:
            inputs, target = learner.normalised(x, y)
            output = learner.forward(inputs, target)
            known = sae.y_mean, output.losses["mse"], None, output.sums
            measured.observe(Observation(target, output.x_hat, output.acts, sae.dead(), *known))
