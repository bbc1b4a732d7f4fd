"""Measures how well latents detect the known features of synthetic data.

The figures are defined as in SAELens (`sae_lens.synthetic.evals`), with the features of SynthSAEBench in mind: each
latent is scored as a detector of the feature whose direction is nearest to its decoder direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from trainer.activations.base import Source
from trainer.activations.synthetic import Synthetic
from trainer.contract.progress import track
from trainer.contract.runs.evaluation_time import KNOWN
from trainer.contract.runs.evaluation_time import KNOWN_ROWS as N_ROWS
from trainer.contract.runs.report_card import KnownFeatures
from trainer.saes.sparse_acts import Acts

_AT_ONCE = 1024
# The largest number of activations to hold in memory at once.
_MOST_VALUES = 2**24
# The largest number of latents or features to match one to one. Matching 4,096 of them takes 1 s, and the time grows
# cubically.
MOST_MATCHED = 4096


@torch.no_grad()
def known_features(source: Source, w_dec: Tensor, acts_of: Callable[[Tensor], Acts]) -> KnownFeatures | None:
    """Return how well latents with decoder directions `w_dec` [d_sae, d] detect known features; None if there are none.

    `acts_of` returns the activations of rows [n, d_in].
    """
    if not isinstance(source, Synthetic):
        return None
    features = source.features.to(w_dec.device)
    nearest, cosines = _nearest(w_dec, features)
    counts = torch.zeros(3, len(w_dec), device=w_dec.device, dtype=torch.float64)
    n_true = 0.0
    at_once = max(1, min(_AT_ONCE, _MOST_VALUES // max(len(features), len(w_dec))))
    parts = np.array_split(source.n_tokens + np.arange(N_ROWS), -(-N_ROWS // at_once))
    for numbers in track(parts, KNOWN):
        known = source.firings(numbers).to(w_dec.device) > 0
        fires, is_true = acts_of(source.rows(numbers).to(w_dec.device)).dense() != 0, known[:, nearest]
        n_true += float(known.sum())
        counts += torch.stack([(fires & is_true).sum(0), (fires & ~is_true).sum(0), (~fires & is_true).sum(0)])
    hits, false_alarms, missed = counts
    precision, recall = _ratio(hits, hits + false_alarms), _ratio(hits, hits + missed)
    f1 = _ratio(2 * precision * recall, precision + recall)
    return KnownFeatures(
        n_features=len(features),
        n_rows=N_ROWS,
        data=source.digest,
        true_l0=n_true / N_ROWS,
        f1=float(f1.mean()),
        f1_error=float(f1.std() / math.sqrt(len(f1))) if len(f1) > 1 else math.nan,
        precision=float(precision.mean()),
        recall=float(recall.mean()),
        uniqueness=len(nearest.unique()) / len(nearest),
        mcc=_matched(cosines),
    )


def _nearest(w_dec: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return each latent's nearest feature [d_sae], and all absolute cosines if there are few enough to match."""
    own, known = normalize(w_dec.float(), dim=1), normalize(features, dim=1)
    if max(len(own), len(known)) <= MOST_MATCHED:
        cosines = (own @ known.T).abs()
        return cosines.argmax(dim=1), cosines
    return torch.cat([(some @ known.T).abs().argmax(dim=1) for some in own.split(_AT_ONCE)]), None


def _matched(cosines: Tensor | None) -> float | None:
    """Return the mean cosine under the best one-to-one matching.

    Return None if there are no cosines, if the weights are not finite, or if scipy is required but not installed.
    """
    if cosines is None or not bool(cosines.isfinite().all()):
        return None
    table = cosines.cpu().numpy()
    # If the best partners are all different, they are the best matching, and scipy's import, 0.3 s, is not needed.
    axis = int(table.shape[0] < table.shape[1])
    if len(np.unique(table.argmax(axis))) == table.shape[1 - axis]:
        return float(table.max(axis).mean())
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        return None
    return float(table[linear_sum_assignment(table, maximize=True)].mean())


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole, or 0 where `whole` is 0."""
    return torch.where(whole > 0, part / whole.clamp_min(1e-300), torch.zeros_like(part))
