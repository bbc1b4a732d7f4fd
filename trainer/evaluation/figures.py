"""Measures an SAE on rows with the metrics defined by SAELens and SAEBench; all sums are in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import normalize

from trainer.activations.base import Indices, Pair, Source
from trainer.contract.runs.report_card import (
    BINS_PER_DECADE,
    LEAST_CLUSTERS,
    LEAST_ROWS_FOR_RARE,
    LOWEST_DECADE,
    RARE,
    AtK,
    Figures,
    Refined,
    TextRows,
)
from trainer.evaluation.crosscoder import CrosscoderRows, crosscoder_figures
from trainer.saes.sparse_acts import Acts

# Takes inputs [n, d_in] and targets [n, d_out]; returns the activations and the reconstructed targets.
Reconstruct = Callable[[Tensor, Tensor], tuple[Acts, Tensor]]
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
# The maximum number of decoder directions to compare with all others.
MOST_COMPARED = 2048
_AT_ONCE = 256


class Levels(NamedTuple):
    """The values of k that an SAE is trained for, ascending, and a function that reconstructs rows with each of them.

    The function returns the activations for the largest k, and the reconstruction for each k.
    """

    ks: Sequence[int]
    reconstruct: Callable[[Tensor, Tensor], tuple[Acts, Sequence[Tensor]]]


class Refinement(NamedTuple):
    """A number of refinement steps, and a function that takes these steps.

    The function takes inputs [n, d_in] and their activations; it returns the refined activations and reconstruction.
    """

    n_steps: int
    refine: Callable[[Tensor, Acts], tuple[Acts, Tensor]]


class Grouped(NamedTuple):
    """Errors and spreads, float64 [n_groups], summed over groups of dependent rows; `of` is the type of group.

    `others` are additional errors, grouped in the same way.
    """

    error: Tensor
    spread: Tensor
    of: str
    others: tuple[Tensor, ...] = ()


# Takes the errors and spreads of rows [n], and additional errors [n], and sums each of them over groups.
Group = Callable[..., Grouped]


class RowFigures(msgspec.Struct, frozen=True):
    """The error, spread and L0 of each row, and the number of rows on which each latent fires."""

    error: Tensor
    spread: Tensor
    l0: Tensor
    fired: Tensor


class Rebuilt:
    """Sums over rows of targets and reconstructions, in float64."""

    def __init__(self) -> None:
        self.n = 0
        self.cosine = self.norm_ratio = self.square = self.error = self.l0 = self._norm = self._product = 0.0
        self._total = torch.zeros(())

    def add(self, target: Tensor, rebuilt: Tensor) -> None:
        """Add targets and reconstructions [n, d_out] in float64."""
        product, norms = (target * rebuilt).sum(1), (target.norm(dim=1), rebuilt.norm(dim=1))
        self.cosine += float((product / (norms[0] * norms[1]).clamp(min=1e-12)).sum())
        self.norm_ratio += float((norms[1] / norms[0].where(norms[0] >= 1e-4, 1.0)).sum())
        self._norm += float(norms[1].square().sum())
        self._product += float(product.sum())

    def add_all(self, target: Tensor, rebuilt: Tensor, acts: Acts) -> None:
        """Add rows to every sum that `text_rows` needs, in a single pass over the rows."""
        target, rebuilt = target.double(), rebuilt.double()
        self.add(target, rebuilt)
        self.n += len(target)
        self._total = self._total.to(target.device) + target.sum(0)
        self.square += float(target.square().sum())
        self.error += float((target - rebuilt).square().sum())
        self.l0 += float((acts.values > 0).sum())

    @property
    def bias(self) -> float:
        return self._norm / self._product if self._product else math.nan

    def text_rows(self) -> TextRows:
        n = max(1, self.n)
        spread = self.square - float(self._total.square().sum()) / n
        return TextRows(
            n_rows=self.n,
            explained_variance=1 - self.error / spread if spread else math.nan,
            mse=self.error / n,
            cosine=self.cosine / n,
            l0=self.l0 / n,
            l2_ratio=self.norm_ratio / n,
            relative_reconstruction_bias=self.bias,
        )


@torch.no_grad()
def measure(
    reconstruct: Reconstruct,
    batches: Callable[[], Iterable[Pair]],
    w_dec: Tensor,
    grouped: Group | None = None,
    scales: Tensor | None = None,
    levels: Levels | None = None,
    refinement: Refinement | None = None,
    parts: CrosscoderRows | None = None,
) -> Figures:
    """Measure an SAE with decoder `w_dec` [d_sae, d_out] on `batches()`, which is called twice for the same rows.

    `grouped` sums errors and spreads [n] over groups of dependent rows; without it, rows are treated as independent.
    `scales` [d_out] are the dimension scales used in training: all metrics except `fvu_all_dimensions` use scaled
    targets. `levels` replaces `reconstruct` for an SAE that is trained for several k. With `refinement`, refined
    activations are also measured. `parts` are the parts of a crosscoder's rows. Raise `ValueError` if there are no
    rows.
    """
    mean = _mean(y for _, y in batches())
    factors = torch.ones((), dtype=torch.float64, device=mean.device) if scales is None else scales.double()
    of_all = torch.zeros(2, dtype=torch.float64)
    sums = Rebuilt()
    counted: list[RowFigures] = []
    errors: list[list[Tensor]] = []
    refined_l0: list[Tensor] = []
    ks, d_in = levels.ks if levels else (), 0
    of_parts: list[Tensor] = []
    for x, y in batches():
        acts, x_hats = levels.reconstruct(x, y) if levels else _alone(reconstruct(x, y))
        x_hat, others = x_hats[-1], [*x_hats[: len(ks)]]
        if refinement:
            refined, x_hat_refined = refinement.refine(x, acts)
            refined_l0.append(refined.per_token((refined.values > 0).to(x_hat.dtype)).cpu())
            others.append(x_hat_refined)
        target, rebuilt, d_in = y.double(), x_hat.double(), x.shape[1]
        of_all += torch.stack([(target - rebuilt).square().sum(), (target - mean).square().sum()]).cpu()
        target, rebuilt = target * factors, rebuilt * factors
        sums.add(target, rebuilt)
        fires = acts.values > 0
        per_row = acts.per_token(fires.to(x_hat.dtype))
        squares = (target - rebuilt).square(), (target - mean * factors).square()
        error, spread = (one.sum(1) for one in squares)
        if parts:
            each = [part.sum(1).cpu() for one in squares for part in one.split(parts.widths, dim=1)]
            of_parts.append(torch.stack(each))
        counted.append(RowFigures(error.cpu(), spread.cpu(), per_row.cpu(), acts.count_by_latent(fires).double().cpu()))
        errors.append([(target - one.double() * factors).square().sum(1).cpu() for one in others])
    error, spread, l0 = (torch.cat([getattr(one, name) for one in counted]) for name in ("error", "spread", "l0"))
    rows = RowFigures(error, spread, l0, torch.stack([one.fired for one in counted]).sum(0))
    of_others = [torch.cat(column) for column in zip(*errors, strict=True)]
    n_others = len(of_others)
    of_others += [*torch.cat(of_parts, dim=1)] if parts else []
    groups = grouped(error, spread, *of_others) if grouped else Grouped(error, spread, "", tuple(of_others))
    w_dec = w_dec if scales is None else w_dec * scales
    figures = _figures(rows, sums, d_in, w_dec, groups)
    fvus = [
        (_fvu(one, spread), ratio_error(of_groups, groups.spread))
        for one, of_groups in zip(of_others[:n_others], groups.others[:n_others], strict=True)
    ]
    figures = msgspec.structs.replace(figures, by_k=tuple(AtK(k, *fvu) for k, fvu in zip(ks, fvus, strict=False)))
    if refinement:
        refined_l0_mean = float(torch.cat(refined_l0).double().mean())
        figures = msgspec.structs.replace(figures, refined=Refined(refinement.n_steps, *fvus[-1], refined_l0_mean))
    if parts:
        n = len(parts.widths)
        own = zip(of_others[-2 * n : -n], of_others[-n:], strict=True)
        of_groups = zip(groups.others[-2 * n : -n], groups.others[-n:], strict=True)
        of_each = [(_fvu(*one), ratio_error(*grouped)) for one, grouped in zip(own, of_groups, strict=True)]
        crosscoder = crosscoder_figures(w_dec, rows.fired > 0, parts, factors, of_each)
        figures = msgspec.structs.replace(figures, crosscoder=crosscoder)
    if scales is None:
        return figures
    return msgspec.structs.replace(figures, fvu_all_dimensions=float(of_all[0] / of_all[1].clamp(min=1e-300)))


def _alone(found: tuple[Acts, Tensor]) -> tuple[Acts, list[Tensor]]:
    return found[0], [found[1]]


def _mean(batches: Iterable[Tensor]) -> Tensor:
    total, n = torch.zeros(()), 0
    for y in batches:
        total, n = total.to(y.device) + y.double().sum(0), n + len(y)
    if not n:
        raise ValueError("there are no rows to measure on")
    return total / n


def _figures(rows: RowFigures, sums: Rebuilt, d_in: int, w_dec: Tensor, groups: Grouped) -> Figures:
    n, density = len(rows.error), rows.fired / len(rows.error)
    fvu = _fvu(rows.error, rows.spread)
    dead = float((density == 0).double().mean())
    return Figures(
        n_tokens=n,
        d_in=d_in,
        d_sae=len(density),
        fvu=fvu,
        fvu_error=ratio_error(groups.error, groups.spread),
        n_clusters=len(groups.error) if groups.of else 0,
        clustered_by=groups.of,
        median_row_fvu=float((rows.error / rows.spread.clamp(min=1e-300)).median()),
        explained_variance=1 - fvu,
        mse=float(rows.error.mean()),
        cosine=sums.cosine / n,
        l0=float(rows.l0.double().mean()),
        l0_quantiles=[float(rows.l0.double().quantile(share)) for share in QUANTILES],
        l2_ratio=sums.norm_ratio / n,
        relative_reconstruction_bias=sums.bias,
        dead=dead,
        dead_error=math.sqrt(dead * (1 - dead) / len(density)),
        rare=float(((density > 0) & (density <= RARE)).double().mean()) if n >= LEAST_ROWS_FOR_RARE else None,
        dense_1=float((density > 0.01).double().mean()),
        dense_10=float((density > 0.1).double().mean()),
        density_histogram=histogram(density),
        max_decoder_cosine=largest_cosines(w_dec),
        l0_below_most=float((rows.l0 < rows.l0.max()).double().mean()),
    )


def _fvu(error: Tensor, spread: Tensor) -> float:
    return float(error.sum() / spread.sum().clamp(min=1e-300))


def by_label(labels: Indices, values: Tensor) -> Tensor:
    """Return the sum of the values [n] for each label, float64 [n_labels], in label order."""
    _, indices = torch.from_numpy(labels).unique(return_inverse=True)
    sums = torch.zeros(int(indices.max()) + 1 if len(indices) else 0, dtype=torch.float64)
    return sums.index_add(0, indices, values.double().cpu())


def ratio_error(numerators: Tensor, denominators: Tensor) -> float:
    """Return the standard error of Σ numerators / Σ denominators for [n] independent clusters (delta method).

    Return NaN if there are too few clusters.
    """
    n, total = len(numerators), float(denominators.sum())
    if n < LEAST_CLUSTERS or not total:
        return math.nan
    left = numerators - numerators.sum() / total * denominators
    return float((left.square().sum() * n / (n - 1)).sqrt()) / abs(total)


def histogram(density: Tensor) -> list[int]:
    """Return the number of latents in each bin of log10 density; the first bin also includes all lower densities.

    `density` is [d_sae]. Latents that never fire are not counted. The last bin's upper limit is 0.
    """
    fire = density[density > 0].double().log10()
    n_bins = -LOWEST_DECADE * BINS_PER_DECADE
    bins = ((fire - LOWEST_DECADE) * BINS_PER_DECADE).floor().clamp(0, n_bins - 1).long()
    return torch.bincount(bins, minlength=n_bins).tolist()


def largest_cosines(w_dec: Tensor, seed: int = 0) -> float:
    """Return a latent's largest decoder cosine with any other latent, averaged over at most `MOST_COMPARED` latents."""
    directions = normalize(w_dec.float(), dim=1)
    if len(directions) < 2:
        return math.nan
    generator = torch.Generator().manual_seed(seed)
    which = torch.randperm(len(directions), generator=generator)[:MOST_COMPARED].to(directions.device)
    largest = []
    for some in which.split(_AT_ONCE):
        cosines = directions[some] @ directions.T
        cosines.scatter_(1, some[:, None], -1.0)
        largest.append(cosines.amax(1))
    return float(torch.cat(largest).double().mean())


@torch.no_grad()
def recovered(features: Tensor, w_dec: Tensor) -> float:
    """Return the MMCS: the mean over known features [n, d_out] of the largest cosine with a decoder direction.

    See Sharkey et al. 2022, "Taking features out of superposition with sparse autoencoders".
    """
    directions = normalize(w_dec.float(), dim=1)
    truth = normalize(features.to(directions), dim=1)
    return float(torch.cat([(some @ directions.T).amax(1) for some in truth.split(_AT_ONCE)]).double().mean())


def recovery(source: Source, w_dec: Tensor) -> float | None:
    """Return the MMCS with a source's true features, or None if these are unknown."""
    features = getattr(source, "features", None)
    return None if features is None else recovered(features, w_dec)
