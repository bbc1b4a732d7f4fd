"""Sets SAEs' thresholds on held-out rows, so that L0 on these rows is as close as possible to the configured k.

A threshold learnt in training is fitted to the training rows: on a sample of 138 texts, L0 was 31.8 on training rows
and 36.4 on held-out rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from trainer.activations.base import Pair
from trainer.activations.training_data import HALVES
from trainer.parallel.base import Parallel
from trainer.parallel.group import sum_of
from trainer.saes.base import Sae
from trainer.saes.batch_topk import UNSET, BatchTopK
from trainer.sharing.base import OF_RANKED
from trainer.training.held_out import HeldOut
from trainer.training.learner import Learner

# The bit patterns of positive fp32 numbers have the same order as the numbers. Without their last 13 bits, the patterns
# are indices of bins that are 0.1 % wide. One pass counts the values per bin, and ranks sum their counts, so the result
# does not depend on how the rows are distributed over ranks.
_DROPPED_BITS = 13
_N_BINS = (0x7F800000 >> _DROPPED_BITS) + 1
# The maximum number of pre-activations to count at once.
_MOST_VALUES = 2**24
# The metadata key that says on which rows an exported SAE's threshold was set.
SET_ON = "threshold_set_on"
# The metadata key for the thresholds for the two halves of the held-out rows, in the activations' units. Each threshold
# was set on the other half.
OF_HALVES = "thresholds_of_held_out_halves"


@torch.no_grad()
def set_thresholds(
    learners: Mapping[str, Learner], held_out_rows: HeldOut, parallel: Parallel, batch_size: int
) -> None:
    """Set the thresholds of all SAEs that use thresholds; every rank counts the values in its held-out rows."""
    choosing = {label: one for label, one in learners.items() if isinstance(one.sae, BatchTopK)}
    if not choosing:
        return
    parts: dict[str, Tensor] = {}
    for label, learner in choosing.items():
        with learner.evaluating():
            for half in HALVES:
                counts, n_rows = _counts(learner, held_out_rows.batches(learner.hook, batch_size, half))
                parts[f"{label}/{half}"] = torch.cat([sum_of(counts, learner.latents.group), n_rows])
    totals = parallel.sum_parts(parts, parallel.data)
    for labels in _by_threshold(choosing):
        first, second = (torch.stack([totals[f"{label}/{half}"] for label in labels]).sum(0) for half in HALVES)
        # The rows of every SAE are counted, so k is a mean over the SAEs.
        k = cast(BatchTopK, choosing[labels[0]].sae).k
        # Each half is measured with the threshold set on the other half.
        values = [threshold_for(of[:-1], int(of[-1]), k) for of in (first + second, second, first)]
        for label in labels:
            cast(BatchTopK, choosing[label].sae).set_thresholds.copy_(torch.tensor(values))


def _by_threshold(learners: Mapping[str, Learner]) -> list[list[str]]:
    """Group labels by threshold: layers that share k have one threshold, other SAEs each their own."""
    sharing = [label for label, one in learners.items() if cast(BatchTopK, one.sae).shares_k]
    return [*([label] for label in learners if label not in sharing), *([sharing] if sharing else [])]


def _counts(learner: Learner, batches: Iterable[Pair]) -> tuple[Tensor, Tensor]:
    """Return this rank's count of positive pre-activations in each bin, float64 [n_bins], and its row count, [1]."""
    sae = learner.sae
    assert isinstance(sae, BatchTopK)
    counts = torch.zeros(_N_BINS, dtype=torch.float64, device=sae.W_enc.device)
    at_once, n_rows = max(1, _MOST_VALUES // max(1, sae.n_own)), 0
    for x, y in batches:
        inputs, _ = learner.normalised(x, y)
        for some in inputs.split(at_once):
            # Compute pre-activations in fp32, the exported SAE's dtype.
            counts += count_values(sae.pre_acts_of(some))
        n_rows += len(x)
    return counts, counts.new_full((1,), n_rows)


def count_values(values: Tensor) -> Tensor:
    """Return the number of positive fp32 values in each bin, int64 [n_bins]."""
    bits = values[values > 0].view(torch.int32) >> _DROPPED_BITS
    return torch.bincount(bits, minlength=_N_BINS)


def threshold_for(counts: Tensor, n_rows: int, k: int) -> float:
    """Return the threshold that brings L0 as close to k as the bins allow, or `UNSET` if there are no rows.

    `counts` [n_bins] contains the number of positive pre-activations of `n_rows` rows in each bin. If there are fewer
    than k positive pre-activations per row on average, the threshold is 0.
    """
    if not n_rows:
        return UNSET
    active = counts.flip(0).cumsum(0).flip(0)
    miss = (active - k * n_rows).abs().masked_fill(active == 0, torch.inf)
    lowest = int(miss.argmin())
    if lowest == 0:
        return 0.0
    # Return the largest number below the bin, since a latent is active only if its value exceeds the threshold.
    return float(torch.tensor((lowest << _DROPPED_BITS) - 1, dtype=torch.int32).view(torch.float32))


def threshold_facts(sae: Sae) -> dict[str, Any]:
    """Return facts about a BatchTopK SAE's threshold for its export metadata; {} for other architectures."""
    if not isinstance(sae, BatchTopK):
        return {}
    whole, *halves = (sae.set_thresholds / sae.acts_scale).tolist()
    ranked = {} if sae.rank_norms() is None else {OF_RANKED: float(sae.cut / sae.acts_scale)}
    if whole < 0:
        return {SET_ON: "training rows"} | ranked
    return {SET_ON: "held-out rows", OF_HALVES: [whole if one < 0 else one for one in halves]} | ranked
