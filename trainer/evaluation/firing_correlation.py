"""Correlates the activations of latents from SAEs trained with different seeds.

The correlation is Pearson's, over rows, as in Bricken et al. (2023), "Towards monosemanticity", who call it activation
similarity. They pair each latent with the latent of the largest correlation, which takes d_sae² correlations. Here, the
decoder directions choose the pairs, as in Paulo and Belrose (2025), which takes only d_sae.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.contract.runs.evaluation_time import FIRING
from trainer.evaluation.exported import ExportedSae
from trainer.evaluation.rows import EvaluationRows

# The largest number of activations to compute at a time: 2^24 take 64 MiB.
_AT_ONCE = 2**24
# A latent whose variance is a smaller share of its mean square counts as constant; the rest is rounding.
_LEAST_VARIANCE = 1e-12
# The two SAEs that are compared, by label; the second one has the partners.
Pair = tuple[str, str]


class FiringCorrelations(NamedTuple):
    """For each pair of SAEs, the correlation [d_sae] of each of the first SAE's latents with its partner.

    A latent that is constant on the rows, usually because it never fires, has no correlation (NaN). If only its partner
    is constant, the correlation is 0. `rows` is a digest of the `n_rows` rows.
    """

    of_pairs: Mapping[Pair, Tensor]
    n_rows: int
    rows: str


NOT_MEASURED = FiringCorrelations({}, 0, "")


class _Fired(NamedTuple):
    """The nonzero activations in some rows, in fp64, sorted by latent, and how many of them each latent has.

    Only a few latents fire on a row, so this takes a fraction of the time and memory of dense products.
    """

    acts: Tensor
    rows: Tensor
    latents: Tensor
    counts: Tensor

    @classmethod
    def in_rows(cls, acts: Tensor) -> _Fired:
        of_latents = acts.T.contiguous()
        latents, rows = of_latents.nonzero(as_tuple=True)
        counts = latents.bincount(minlength=len(of_latents))
        return cls(of_latents[latents, rows].double(), rows, latents, counts)

    def by_latent(self, values: Tensor) -> Tensor:
        """Return the sum of the values for each latent, [d_sae]."""
        return torch.segment_reduce(values, "sum", lengths=self.counts, initial=0.0)


@torch.no_grad()
def firing_correlations(
    saes: Mapping[str, ExportedSae], partners: Mapping[Pair, Tensor], rows: EvaluationRows
) -> FiringCorrelations:
    """Correlate the activations of each latent and its partner in another SAE.

    `saes` maps labels to SAEs of the same width. `partners` maps each pair of SAEs to the indices [d_sae] of the
    partners in the second SAE.
    """
    zeros = {label: torch.zeros(sae.d_sae, dtype=torch.float64, device=sae.W_dec.device) for label, sae in saes.items()}
    totals, squares = ({label: zero.clone() for label, zero in zeros.items()} for _ in range(2))
    products = {pair: zeros[pair[0]].clone() for pair in partners}
    n_rows = 0
    for acts in _activations(saes, rows):
        n_rows += len(next(iter(acts.values())))
        for label, own in acts.items():
            fired = _Fired.in_rows(own)
            totals[label] += fired.by_latent(fired.acts)
            squares[label] += fired.by_latent(fired.acts.square())
            for pair in (one for one in partners if one[0] == label):
                of_partners = acts[pair[1]][fired.rows, partners[pair][fired.latents]]
                products[pair] += fired.by_latent(fired.acts * of_partners)
    deviations = {label: _deviation(totals[label], squares[label], n_rows) for label in saes}
    of_pairs = {}
    for (one, other), partner in partners.items():
        expected = totals[one] * totals[other][partner] / max(1, n_rows)
        scale = deviations[one] * deviations[other][partner]
        correlation = ((products[one, other] - expected) / scale).clamp(-1, 1).where(scale > 0, 0.0)
        of_pairs[one, other] = correlation.where(deviations[one] > 0, torch.nan)
    return FiringCorrelations(of_pairs, n_rows, rows.digest)


def _activations(saes: Mapping[str, ExportedSae], rows: EvaluationRows) -> Iterator[dict[str, Tensor]]:
    """Yield the activations [n, d_sae] of every SAE on the same rows, a few rows at a time."""

    @contextlib.contextmanager
    def measuring_half(half: int) -> Iterator[None]:
        with contextlib.ExitStack() as halves:
            for sae in saes.values():
                halves.enter_context(sae.measuring_half(half))
            yield

    n_at_once = max(1, _AT_ONCE // sum(sae.d_sae for sae in saes.values()))
    for x, _ in rows.batches(measuring_half, FIRING):
        for some in x.split(n_at_once):
            yield {label: sae.encode(some).values for label, sae in saes.items()}


def _deviation(total: Tensor, squares: Tensor, n_rows: int) -> Tensor:
    """Return the square root of the sum of squared deviations from the mean; 0 for a latent that is constant."""
    varying = squares - total.square() / max(1, n_rows)
    return varying.where(varying > _LEAST_VARIANCE * squares, 0.0).sqrt()
