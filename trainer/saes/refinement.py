"""Refines the activations of a trained SAE by normalised iterative hard thresholding (Blumensath & Davies 2010)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.saes.base import Sae
from trainer.saes.kernels.sparse import decode, row_products
from trainer.saes.sparse_acts import Acts, SparseActs, SparseIndices


def refined(x: Tensor, acts: Acts, W_dec: Tensor, n_steps: int) -> Acts:
    """Return activations that reconstruct x [n_tokens, d_in], the data minus the offset, better than `acts`.

    Each step takes a gradient step on ‖x − acts @ W_dec‖², keeps the largest activations, and then takes a second
    gradient step on these alone. A token never gets more active latents or a larger error than before. On MiniLM and
    SmolLM2 SAEs with k = 32, one step lowers the FVU by 12 to 16 % and replaces a sixth of the active latents. On one
    core, it takes 0.1 ms per token with d_in = 384 and 3,072 latents, five times as long as encoding.
    """
    whole = acts.dense()
    if not len(whole):
        return acts
    n_active = (whole > 0).sum(dim=1, keepdim=True)
    found = _Refined.of(x, *whole.topk(max(1, int(n_active.max())), dim=1), W_dec)
    for _ in range(n_steps):
        chosen = found.or_better(_chosen_again(x, found, n_active, W_dec))
        found = chosen.or_better(_rescaled(x, chosen, W_dec))
    return _listed(found.values, found.latents, W_dec)


def refined_output(sae: Sae, x: Tensor, acts: Acts, n_steps: int) -> tuple[Acts, Tensor]:
    """Refine the activations of normalised data x [n_tokens, d_in]; return the new ones and their reconstruction."""
    better = refined(x - sae.b_dec, acts, sae.W_dec, n_steps)
    return better, sae.reconstruct(better, x, x)[0]


def refuse_transcoder(field: str, *, is_transcoder: bool) -> None:
    """Raise `UserError` if activations cannot be refined, as `field` asks for, because the SAE is a transcoder."""
    if is_transcoder:
        raise UserError(f"{field}: must be 0 for a transcoder, which encodes without knowing its target")


class _Refined(NamedTuple):
    """The activations `values` of the `latents`, both [n_tokens, n], and the error x − x_hat [n_tokens, d_in]."""

    values: Tensor
    latents: Tensor
    error: Tensor

    @classmethod
    def of(cls, x: Tensor, values: Tensor, latents: Tensor, W_dec: Tensor) -> _Refined:
        return cls(values, latents, x - decode(_listed(values, latents, W_dec), W_dec))

    def or_better(self, other: _Refined) -> _Refined:
        """Return, for each token, the activations with the smaller error."""
        is_better = other.error.square().sum(dim=1) < self.error.square().sum(dim=1)
        return _Refined(*(torch.where(is_better[:, None], new, own) for own, new in zip(self, other, strict=True)))


def _chosen_again(x: Tensor, found: _Refined, n_active: Tensor, W_dec: Tensor) -> _Refined:
    """Take a gradient step, and keep each token's `n_active` [n_tokens, 1] largest activations."""
    slopes = found.error @ W_dec.T
    length = _best_length(slopes.gather(1, found.latents) * (found.values > 0), found.latents, W_dec)
    moved = (slopes * length).scatter_add_(1, found.latents, found.values)
    # topk sorts, so a token's largest activations come first.
    values, latents = moved.topk(found.latents.shape[1], dim=1)
    is_kept = torch.arange(values.shape[1], device=x.device) < n_active
    return _Refined.of(x, values.relu() * is_kept, latents, W_dec)


def _rescaled(x: Tensor, found: _Refined, W_dec: Tensor) -> _Refined:
    """Take a gradient step on the active latents alone."""
    indices = _listed(found.values, found.latents, W_dec).indices
    slopes = row_products(found.error, W_dec, indices).view_as(found.values) * (found.values > 0)
    values = found.values + slopes * _best_length(slopes, found.latents, W_dec)
    return _Refined.of(x, values.relu(), found.latents, W_dec)


def _best_length(slopes: Tensor, latents: Tensor, W_dec: Tensor) -> Tensor:
    """Return each token's multiple of `slopes` [n_tokens, n] that lowers its squared error most, [n_tokens, 1].

    `slopes` must be the inner products of the error with the rows of W_dec, or 0.
    """
    change = decode(_listed(slopes, latents, W_dec), W_dec)
    return slopes.square().sum(dim=1, keepdim=True) / change.square().sum(dim=1, keepdim=True).clamp_min(1e-30)


def _listed(values: Tensor, latents: Tensor, W_dec: Tensor) -> SparseActs:
    starts = torch.arange(len(values), device=values.device) * values.shape[1]
    return SparseActs(values.flatten(), SparseIndices(latents.flatten(), None, starts), len(W_dec))
