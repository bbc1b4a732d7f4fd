"""Measures SAEs on held-out data, in the form used for export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

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
from trainer.training.layers import Layers, trained_together
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
    intervals = {learner: measured[label] for label, learner in learners.items()}
    for unit in trained_together(learners.values()):
        own = unit.learners if isinstance(unit, Layers) else [unit]
        batch_of_saes = min(batch_size, most_tokens(max(learner.sae.d_sae for learner in own)))
        for half in HALVES:
            _measure(unit, own, half, held_out_rows.batches(unit.hook, batch_of_saes, half), intervals)
    for label, learner in learners.items():
        parts |= {f"{label}/{name}": sums for name, sums in measured[label].sums(learner.latents).items()}
    totals = parallel.sum_parts(parts, parallel.data)
    values = {label: one.values(under(totals, f"{label}/")) for label, one in measured.items()}
    return {label: {held_out(name): value for name, value in of_sae.items()} for label, of_sae in values.items()}


def most_tokens(d_sae: int) -> int:
    """Return the largest evaluation batch, in tokens, for an SAE with `d_sae` latents in total."""
    return min(MOST_TOKENS, max(1, MOST_VALUES // d_sae))


def _measure(
    unit: Learner | Layers,
    learners: Sequence[Learner],
    half: int,
    batches: Iterable[Pair],
    measured: Mapping[Learner, Interval],
) -> None:
    """Add the metrics for this rank's rows, from one half of the held-out rows, to `measured`."""
    with contextlib.ExitStack() as stack:
        for learner in learners:
            stack.enter_context(learner.sae.measuring_half(half))
            stack.enter_context(learner.evaluating())
        for x, y in batches:
            for learner, target, output in unit.outputs(x, y):
                sae = learner.sae
                known = sae.y_mean, output.losses["mse"], None, output.sums
                measured[learner].observe(Observation(target, output.x_hat, output.acts, sae.dead(), *known))
