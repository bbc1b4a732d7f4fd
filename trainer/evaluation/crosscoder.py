"""Measures in which parts of a crosscoder's rows each latent writes, by its decoder norms and by latent scaling.

Latent scaling is from Minder et al. 2025, "Overcoming sparsity artifacts in crosscoders to interpret chat-tuning"
(arXiv 2504.02922). It asks how much of a part's rows a latent would explain if its decoder row for that part were free:
the decoder may lack a direction only because it was shrunk, or because other latents write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import normalize

from trainer.contract.runs.crosscoder import (
    LEAST_SHARED,
    MOST_NU_ERROR,
    MOST_NU_RECONSTRUCTION,
    NORM_BINS,
    ONLY,
    Crosscoder,
    CrosscoderPart,
)
from trainer.contract.runs.features import PART_NAMES, PART_SHARES, SCALING
from trainer.saes.sparse_acts import Acts, active_entries

# The number of values to multiply at a time. On one core, 1,024 rows of width 1,152 with 32 active latents each take
# 0.17 s with 2^20 values, which fit into the cache, and 0.61 s with 2^24.
_AT_ONCE = 2**20


class CrosscoderRows(NamedTuple):
    """The parts that a crosscoder's rows are joined from: the name and the width of each."""

    names: tuple[str, ...]
    widths: tuple[int, ...]


def shares_of(w_dec: Tensor, widths: Sequence[int]) -> Tensor:
    """Return each part's share of the norms of scaled decoder rows [d_sae, d_out]: [d_sae, n_parts]."""
    norms = torch.stack([part.float().norm(dim=1) for part in w_dec.split(tuple(widths), dim=1)], dim=1)
    total = norms.sum(1, keepdim=True)
    return torch.where(total > 0, norms / total, 1 / len(widths))


def crosscoder_figures(
    w_dec: Tensor, fires: Tensor, parts: CrosscoderRows, scales: Tensor, fvus: Sequence[tuple[float, float]]
) -> Crosscoder:
    """Return the figures of a crosscoder with scaled decoder rows `w_dec` [d_sae, d_out].

    `fires` [d_sae] marks the latents that fire on the measured rows. `scales` are the dimension scales, 0-dim or
    [d_out], and `fvus` contains each part's FVU and its standard error.
    """
    shares, fires, n = shares_of(w_dec, parts.widths).cpu(), fires.cpu(), len(parts.widths)
    # The kind of each latent: the only part in which it writes, n if it is shared, or n + 1 for all others.
    most, part = shares.max(dim=1)
    kinds = torch.where(shares.amin(1) > LEAST_SHARED / n, n, n + 1)
    kinds = torch.where(most > ONLY, part, kinds)
    firing, dead = (torch.bincount(kinds[which], minlength=n + 2).tolist() for which in (fires, ~fires))
    of_parts = part_scales(scales, parts.widths)
    relative = (shares[:, 1] if n == 2 else most)[fires]
    bins = (relative * NORM_BINS).long().clamp(0, NORM_BINS - 1)
    return Crosscoder(
        parts=tuple(
            CrosscoderPart(
                name=name,
                width=parts.widths[number],
                scale=of_parts[number],
                fvu=fvus[number][0],
                fvu_error=fvus[number][1],
                n_only=firing[number],
                n_only_dead=dead[number],
            )
            for number, name in enumerate(parts.names)
        ),
        n_shared=firing[n],
        n_shared_dead=dead[n],
        n_other=firing[n + 1],
        n_other_dead=dead[n + 1],
        norms=torch.bincount(bins, minlength=NORM_BINS).tolist(),
    )


def part_scales(scales: Tensor, widths: Sequence[int]) -> list[float]:
    """Return each part's scale, given the scales of all dimensions: 0-dim, or [d_out]."""
    return [float(part.max()) for part in scales.expand(sum(widths)).split(tuple(widths))]


class LatentScaling:
    """Accumulates, for each latent and part, the two regressions of latent scaling; all sums are in float64.

    For a latent with activations f and a unit vector u in a part, the coefficient is Σ f·⟨u, y⟩ / Σ f². For β_error, y
    is the part's error without the latent's own contribution, and for β_reconstruction, it is the part's
    reconstruction without the bias, whose component along u says nothing about the latent. β is the coefficient divided
    by the norm of the latent's largest decoder row, so that β_error is about 1 in the part that has it.

    As in Minder et al., u is the direction of the largest decoder row, in all parts. If the parts differ in width, u is
    the latent's own direction in each part.
    """

    def __init__(self, w_dec: Tensor, widths: Sequence[int]) -> None:
        """Start with scaled decoder rows `w_dec` [d_sae, d_out]."""
        own = w_dec.float().split(tuple(widths), dim=1)
        norms = torch.stack([part.norm(dim=1) for part in own])
        self._largest, at = norms.max(dim=0)
        if len({*widths}) == 1:
            largest = torch.stack(own)[at, torch.arange(len(at), device=at.device)]
            own_directions = [largest] * len(own)
        else:
            own_directions = list(own)
        self._widths, self._directions = tuple(widths), [normalize(one, dim=1) for one in own_directions]
        products = [(u * part).sum(1) for u, part in zip(self._directions, own, strict=True)]
        self._own = torch.stack(products, dim=1).double()
        zeros = torch.zeros(len(w_dec), len(widths), dtype=torch.float64, device=w_dec.device)
        self._error, self._rebuilt, self._squares = zeros, zeros.clone(), zeros[:, 0].clone()
        self.n_rows = 0

    def add(self, acts: Acts, error: Tensor, rebuilt: Tensor, scale: float = 1.0) -> None:
        """Add activations, and scaled errors and reconstructions (without the bias) [n, d_out].

        `scale` converts the activations to the units in which the decoder reconstructs the rows.
        """
        self.n_rows += len(error)
        latents, tokens, values = active_entries(acts)
        values = values.double() * scale
        self._squares.index_add_(0, latents, values.square())
        for sums, target in ((self._error, error), (self._rebuilt, rebuilt)):
            for number, part in enumerate(target.split(self._widths, dim=1)):
                products = self._products(number, part.float(), latents, tokens)
                sums[:, number].index_add_(0, latents, values * products)

    def _products(self, part: int, rows: Tensor, latents: Tensor, tokens: Tensor) -> Tensor:
        """Return the product of each entry's row and its latent's direction, float64 [n_entries]."""
        some = max(1, _AT_ONCE // rows.shape[1])
        found = [rows.new_zeros(0, dtype=torch.float64)]
        for of_latents, of_tokens in zip(latents.split(some), tokens.split(some), strict=True):
            found.append((self._directions[part][of_latents] * rows[of_tokens]).sum(1).double())
        return torch.cat(found)

    @property
    def has_fired(self) -> Tensor:
        """Whether each latent has fired on the rows so far, bool [d_sae]."""
        return self._squares > 0

    def betas(self) -> tuple[Tensor, Tensor]:
        """Return β_error and β_reconstruction [d_sae, n_parts]; NaN for latents that do not fire."""
        squares, largest = self._squares[:, None], self._largest.double()[:, None]
        return (self._error / squares + self._own) / largest, self._rebuilt / squares / largest


def ratios(betas: Tensor, shares: Tensor) -> Tensor:
    """Return ν [d_sae]: β in the other of two parts, divided by β in the part with the larger share of the norms."""
    larger = shares.argmax(dim=1, keepdim=True).to(betas.device)
    return (betas.gather(1, 1 - larger) / betas.gather(1, larger)).flatten()


def with_scaling(figures: Crosscoder, shares: Tensor, nu: Tensor, n_rows: int) -> Crosscoder:
    """Return the figures with the number of latents that latent scaling confirms.

    `shares` and `nu` [n, 2] belong to the latents that fire on the measured rows.
    """
    is_confirmed = ((nu[:, 0] < MOST_NU_ERROR) & (nu[:, 1] < MOST_NU_RECONSTRUCTION)).cpu()
    parts = [
        msgspec.structs.replace(part, n_confirmed=int(((shares[:, number].cpu() > ONLY) & is_confirmed).sum()))
        for number, part in enumerate(figures.parts)
    ]
    return msgspec.structs.replace(figures, parts=tuple(parts), n_rows=n_rows)


def part_tensors(names: Sequence[str], shares: Tensor) -> dict[str, Tensor]:
    """Return the tensors for the features file: the names of the parts, and their shares of each latent's norms."""
    joined = torch.tensor([*"\n".join(names).encode("utf-8", "replace")], dtype=torch.uint8)
    return {PART_NAMES: joined, PART_SHARES: shares.float().cpu()}


def scaling_tensors(nu: Tensor, betas: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors for the features file with each latent's ν [d_sae, 2] and β [d_sae, 2]."""
    return {name: one.float().cpu() for name, one in zip(SCALING, (*nu.T, *betas), strict=True)}
