"""AuxK's operations on dead latents: finding them, gathering their weights, and adding their gradients.

Each operation has its own GPU kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.runtime.narrow_copy import kept_or_own
from trainer.runtime.triton_kernels import DEAD_LATENTS


class DeadLatents(NamedTuple):
    """Candidates for AuxK: latents with their biases, and the auxiliary loss's weight.

    `latents` [n] are distinct indices. `bias` [n] is b_enc, or −∞ for latents that are not dead. `weight` (0-dim) is
    1 / variance, or 0 if no latent is dead.
    """

    latents: Tensor
    bias: Tensor
    weight: Tensor

    def first(self, n: int) -> DeadLatents:
        """Return the first n latents."""
        return DeadLatents(self.latents[:n], self.bias[:n], self.weight)


class Weights(NamedTuple):
    """The weights of n latents or their gradients, with W_enc [n, d_in] and W_dec [n, d_out] as rows, and b_enc [n]."""

    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor


class Packed(NamedTuple):
    """Weights in one block of memory, `flat`, so that ranks exchange them in one operation."""

    flat: Tensor
    weights: Weights

    @classmethod
    def of(cls, like: Tensor, n: int, d_in: int, d_out: int, dtype: torch.dtype) -> Packed:
        """Allocate weights for n latents on the device of `like`."""
        sizes = n * d_in, n * d_out, n
        flat = like.new_empty(sum(sizes), dtype=dtype, requires_grad=False)
        W_enc, W_dec, b_enc = flat.split(sizes)
        return cls(flat, Weights(W_enc.view(n, d_in), b_enc, W_dec.view(n, d_out)))


def longest_since_fired(
    since_fired: Tensor, b_enc: Tensor, variance: Tensor, dead_after: int, n: int, dtype: torch.dtype
) -> DeadLatents | None:
    """Return the n longest-silent dead latents, sorted by index.

    Silence is capped at 2^31 − 1 tokens, and ties go to the lower index. If fewer than n latents are dead, live
    latents fill the remaining entries. The bias has the matmul dtype, `dtype`. Return None if no kernel applies.
    """
    if (triton := DEAD_LATENTS.on(since_fired, dtype)) and triton.fits(since_fired, dead_after):
        return DeadLatents(*triton.longest_since_fired(since_fired, b_enc, variance, dead_after, n, dtype))
    return None


@torch.no_grad()
def rows(W_enc: Tensor, W_dec: Tensor, latents: Tensor, dtype: torch.dtype, d_out: int) -> Packed:
    """Return the weights of n latents: rows of W_enc.T [d_sae, d_in] and of the first `d_out` columns of W_dec.

    In a cross-layer transcoder, these columns are the layer's own target; the errors of later ones are not known yet.
    The rows have the matmul dtype, `dtype`. If this dtype is narrower than the weights' own, the rows are read from the
    narrow copy that these matmuls use. A latent index of −1 yields rows of zeros. The caller fills in the biases.
    """
    whole_enc, whole_dec = kept_or_own(W_enc, dtype).T, kept_or_own(W_dec, dtype)[:, :d_out]
    packed = Packed.of(W_enc, len(latents), whole_enc.shape[1], whole_dec.shape[1], dtype)
    reads, _, writes = packed.weights
    if (triton := DEAD_LATENTS.on(latents, dtype)) and whole_enc.is_contiguous() and whole_dec.is_contiguous():
        triton.rows(reads, writes, whole_enc, whole_dec, latents)
        return packed
    own, is_missing = latents.clamp_min(0), (latents < 0)[:, None]
    for some, whole in ((reads, whole_enc), (writes, whole_dec)):
        some.copy_(whole.index_select(0, own)).masked_fill_(is_missing, 0)
    return packed


def add(
    wholes: Weights, latents: Tensor, parts: Weights, input_bias: Tensor | None = None, centred: Tensor | None = None
) -> None:
    """Add the gradients `parts` of n distinct latents to the gradients `wholes` of all latents, in place.

    If W_dec has more columns than its part, the part belongs to the first columns.

    `parts` may have a narrower dtype. Entries with a latent index of −1 are skipped. The gradient of the centred input,
    `centred` [d_in], is already summed over tokens, and is subtracted from the gradient of the input bias, `input_bias`
    [d_in].
    """
    if wholes.W_dec.shape[1] > parts.W_dec.shape[1]:
        wholes = wholes._replace(W_dec=wholes.W_dec[:, : parts.W_dec.shape[1]])
    are_plain = all(one.dtype == torch.float32 and one.is_contiguous() for one in wholes)
    if are_plain and len(latents) and (triton := DEAD_LATENTS.on(latents, parts.W_enc.dtype)):
        triton.add(wholes, latents, parts, input_bias, centred)
        return
    own, is_missing = latents.clamp_min(0), latents < 0
    for whole, part in zip(wholes, parts, strict=True):
        missing = is_missing if part.dim() == 1 else is_missing[:, None]
        whole.index_add_(0, own, part.to(whole.dtype).masked_fill(missing, 0))
    if input_bias is not None and centred is not None:
        input_bias -= centred
