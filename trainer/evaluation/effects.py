"""Measures how much a language model's loss changes if a latent is ablated, for every latent of an SAE.

Ablating a latent subtracts its contribution, activation · direction, from the kept rows at the hook. The rest of the
rows stays the model's own, so the SAE's reconstruction error has no influence. A latent of a cross-layer transcoder
contributes to the outputs of several MLPs; ablating it changes all of them.

One forward and two backward passes over the text estimate all effects, as −⟨gradient, contribution⟩ (attribution
patching; Syed et al. 2023, arXiv 2310.10348, and Marks et al. 2024, arXiv 2403.19647) + ½⟨root, contribution⟩². The
second term is the curvature of the loss within a row: the Gauss-Newton matrix is positive semidefinite, and `root` is a
random vector whose expected outer product is its block for the row. The latents with the largest estimates are then
ablated one at a time, on a part of the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.progress import advance, stage
from trainer.contract.runs.effects import AblatedLatent, Effects, LargeEffect
from trainer.contract.runs.evaluation_time import ABLATED_TOKENS, EFFECT_TOKENS, GRADIENT_PASSES, N_ABLATED
from trainer.contract.runs.features import EFFECT, EFFECT_ERROR, EFFECT_FIRING
from trainer.contract.runs.report_card import EFFECTS, LEAST_CLUSTERS, PART_TITLES
from trainer.contract.runs.row_sums import LEAD
from trainer.evaluation.contexts import acts_of
from trainer.evaluation.figures import histogram
from trainer.evaluation.spliced import KeptRows, SplicedModel
from trainer.extraction.packing import ContextBatch
from trainer.saes.kernels.sparse import decode
from trainer.saes.sparse_acts import Acts, active_entries
from trainer.training.learner import Learner

# The number of latents with the largest effects to list on a report card.
_N_LISTED = 5
_NO_KEYS, _NO_SUMS = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)


class SaeLatents(NamedTuple):
    """An SAE's latents in the units of raw rows.

    `acts_of` returns the activations of rows [n, d_in] in training units, `scale` times as large as in raw units.
    `directions` [d_sae, d_out] are the decoder's directions in raw units. If the model has several pairs of hooks, the
    rows are read at pair `pair`, and the directions are joined from the ones at this and all later pairs.
    """

    acts_of: Callable[[Tensor], Acts]
    scale: Tensor
    directions: Tensor
    pair: int = 0

    @torch.no_grad()
    def raw_acts(self, rows: Tensor) -> Acts:
        acts = self.acts_of(rows)
        return acts.with_values(acts.values / self.scale)


class ReadBatch(NamedTuple):
    """A batch after the backward passes: the loss in each context [n_contexts], and each latent's effect [d_sae]."""

    batch: ContextBatch
    kept: KeptRows
    loss: Tensor
    effects: Tensor


class EffectSums:
    """Each latent's estimated effects, summed over texts in float64."""

    def __init__(self, d_sae: int) -> None:
        self._d_sae = d_sae
        # For each batch: a key for each pair of a text and a latent, the pair's sum, and the text of each prediction.
        self._keys, self._sums, self._predictions = [_NO_KEYS], [_NO_SUMS], [_NO_KEYS]
        self.n_fired = torch.zeros(d_sae, dtype=torch.int64)

    def add(self, kept: KeptRows, latents: Tensor, rows: Tensor, effects: Tensor) -> Tensor:
        """Add the effects [n] of active latents on the kept rows of a batch; return each latent's sum, [d_sae]."""
        texts = kept.documents[kept.counts][rows]
        keys, sums = _summed((texts * self._d_sae + latents).cpu(), effects.double().cpu())
        self._keys.append(keys)
        self._sums.append(sums)
        self._predictions.append(kept.documents[:, :-1][kept.predicts].cpu())
        self.n_fired += torch.bincount(latents, minlength=self._d_sae).cpu()
        return self._by_latent(keys, sums)

    def _by_latent(self, keys: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(self._d_sae, dtype=torch.float64).index_add(0, keys % self._d_sae, values)

    @property
    def n_tokens(self) -> int:
        """The number of predictions in the loss."""
        return sum(map(len, self._predictions))

    @property
    def n_texts(self) -> int:
        return len(torch.cat(self._predictions).unique())

    def means_and_errors(self) -> tuple[Tensor, Tensor]:
        """Return each latent's effect per prediction and its standard error over texts, both float64 [d_sae].

        The error is the one of a ratio of sums, as in `figures.ratio_error`; it is NaN if there are too few texts.
        """
        keys, sums = _summed(torch.cat(self._keys), torch.cat(self._sums))
        means = self._by_latent(keys, sums) / self.n_tokens
        texts, counts = torch.cat(self._predictions).unique(return_counts=True)
        n = len(texts)
        if n < LEAST_CLUSTERS:
            return means, torch.full_like(means, math.nan)
        # A text without predictions has effects of 0.
        place = torch.searchsorted(texts, keys // self._d_sae).clamp(max=n - 1)
        products = self._by_latent(keys, sums * counts[place])
        squares = self._by_latent(keys, sums.square()) - 2 * means * products + means.square() * counts.square().sum()
        return means, (squares.clamp(min=0) * n / (n - 1)).sqrt() / self.n_tokens


def _summed(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct keys, ascending, and the sum of the values for each of them."""
    distinct, place = keys.unique(return_inverse=True)
    return distinct, values.new_zeros(len(distinct)).index_add(0, place, values)


def effects_of(model: SplicedModel, learner: Learner, n_tokens: int | None) -> tuple[Effects, dict[str, Tensor]]:
    """Measure the effects of a learner's latents; see `measure_effects`."""
    sae = learner.sae
    pair = learner.layer.number if learner.layer else 0
    latents = SaeLatents(partial(acts_of, learner), sae.acts_scale, sae.raw_decoder().detach(), pair)
    return measure_effects(model, latents, n_tokens)


def measure_effects(
    model: SplicedModel, latents: SaeLatents, n_tokens: int | None = None, n_ablated_tokens: int | None = None
) -> tuple[Effects, dict[str, Tensor]]:
    """Estimate the effect of every latent on about `n_tokens` tokens, and ablate the latents with the largest ones.

    The ablations read about `n_ablated_tokens` of these tokens. The numbers default to `EFFECT_TOKENS` and
    `ABLATED_TOKENS` for the device. Return the figures for the report card and the tensors for the features file. Raise
    `UserError` if no rows remain.
    """
    text, is_unseen = model.batches(n_tokens or EFFECT_TOKENS[model.device.type])
    wanted = n_ablated_tokens or ABLATED_TOKENS[model.device.type]
    part = [*_evenly(len(text), math.ceil(wanted / max(1, text[0].ids.size)))] if text else []
    stage(PART_TITLES[EFFECTS], len(text) * GRADIENT_PASSES + len(part) * N_ABLATED)
    sums, read = EffectSums(len(latents.directions)), []
    loss = 0.0
    for number, batch in enumerate(text):
        one = _estimated(model, latents, batch, sums)
        loss += float(one.loss.sum())
        read += [one] if number in part and one.kept.predicts.any() else []
        advance(GRADIENT_PASSES)
    if not sums.n_tokens:
        raise UserError("text.path: the text has no rows to measure on; provide more text")
    means, errors = sums.means_and_errors()
    if not means.isfinite().all():
        raise UserError('--effects: the gradient of the model is not finite; set model.dtype = "fp32" in its job file')
    per_firing = means * sums.n_tokens / sums.n_fired.clamp(min=1)
    largest = [one for one in means.abs().argsort(descending=True, stable=True).tolist()[:N_ABLATED] if means[one]]
    ablated, n_ablated_tokens = _ablated(model, latents, read, largest)
    clear = means.abs() > LEAD * errors
    figures = Effects(
        text=model.text,
        is_unseen=is_unseen,
        n_tokens=sums.n_tokens,
        n_texts=sums.n_texts,
        loss=loss / sums.n_tokens,
        n_firing=int((sums.n_fired > 0).sum()),
        n_helping=int(((means > 0) & clear).sum()),
        n_hurting=int(((means < 0) & clear).sum()),
        helping=histogram(means),
        hurting=histogram(-means),
        largest=tuple(
            LargeEffect(one, float(means[one]), float(errors[one]), float(per_firing[one]))
            for one in largest[:_N_LISTED]
        ),
        ablated=ablated,
        n_ablated_tokens=n_ablated_tokens,
        **_agreement(ablated),
    )
    of_latents = {EFFECT: means, EFFECT_ERROR: errors, EFFECT_FIRING: per_firing}
    return figures, {name: one.float() for name, one in of_latents.items()}


def _evenly(n: int, n_wanted: int) -> range:
    """Return about `n_wanted` numbers below `n`, evenly spaced."""
    return range(0, n, max(1, n // max(1, n_wanted)))[: max(1, n_wanted)]


def _estimated(model: SplicedModel, latents: SaeLatents, batch: ContextBatch, sums: EffectSums) -> ReadBatch:
    """Add a batch's estimates to `sums`, and return the batch with its estimates."""
    kept = model.kept(batch)
    if not kept.counts.any():
        return ReadBatch(batch, kept, torch.zeros(len(batch.ids)), torch.zeros(len(latents.directions)))
    rows, gradient, root, loss = model.gradients(batch, kept, latents.pair)
    acts = latents.raw_acts(rows)
    values = acts.values.detach().requires_grad_()
    with torch.enable_grad():
        # The gradient of the activations is a product of only the active directions with the rows' gradient.
        contributions = decode(acts.with_values(values), latents.directions)
        slope, random = (
            acts.values * torch.autograd.grad(contributions, values, one, retain_graph=True)[0]
            for one in (gradient, root)
        )
    which, of_rows, _ = active_entries(acts)
    effects = (random.square() / 2 - slope)[acts.values > 0]
    return ReadBatch(batch, kept, loss, sums.add(kept, which, of_rows, effects))


def _ablated(
    model: SplicedModel, latents: SaeLatents, read: Sequence[ReadBatch], chosen: Sequence[int]
) -> tuple[tuple[AblatedLatent, ...], int]:
    """Ablate the chosen latents, one at a time, on the given batches; leave out latents that do not fire on them.

    Return the estimated and the true effects per prediction, and the number of predictions.
    """
    n_tokens = sum(int(one.kept.predicts.sum()) for one in read)
    changes, fires = torch.zeros(len(chosen), dtype=torch.float64), torch.zeros(len(chosen), dtype=torch.bool)
    for one in read:
        which, all_rows, all_values = active_entries(latents.raw_acts(model.rows(one.batch, one.kept, latents.pair)))
        with model.skipping(one.batch, one.kept, latents.pair):
            for place, latent in enumerate(chosen):
                rows, values = all_rows[which == latent], all_values[which == latent]
                if len(rows):
                    added = latents.directions.new_zeros(int(one.kept.counts.sum()), latents.directions.shape[1])
                    added[rows] = -values[:, None] * latents.directions[latent]
                    changed = model.loss_by_context(one.batch, one.kept, added, latents.pair)
                    changes[place] += (changed - one.loss).sum()
                    fires[place] = True
                advance()
    estimates = sum((one.effects for one in read), torch.zeros(len(latents.directions), dtype=torch.float64))
    found = [
        AblatedLatent(latent, float(estimates[latent]) / n_tokens, float(changes[place]) / n_tokens)
        for place, latent in enumerate(chosen)
        if fires[place]
    ]
    return tuple(found), n_tokens


def _agreement(ablated: Sequence[AblatedLatent]) -> dict[str, float]:
    """Return the correlations of estimates and ablations, and the ratio of the sums of their absolute values."""
    if len(ablated) < 3:
        return {}
    both = torch.tensor([[one.estimate, one.ablation] for one in ablated], dtype=torch.float64).T
    ranks = both.argsort(1).argsort(1).double()
    sizes = both.abs().sum(1)
    return {
        "pearson": float(torch.corrcoef(both)[0, 1]),
        "spearman": float(torch.corrcoef(ranks)[0, 1]),
        "ratio": float(sizes[0] / sizes[1]),
    }
