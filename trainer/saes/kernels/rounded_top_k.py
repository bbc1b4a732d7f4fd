"""The largest pre-activations by way of a rounded product: a first look in bf16, then exact ones for what can matter.

A CPU that multiplies bf16 matrices in hardware does so eight times as fast as fp32. How far a rounded product can be
off is known: |x·w − x̃·w̃| ≤ ‖x − x̃‖ ‖w‖ + ‖x̃‖ ‖w − w̃‖. What lies further than that below the k-th exact value is
not among the largest, and where too little does, the exact product is made: what is found is what that alone finds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.contract.planning import first_look
from trainer.saes.kernels import packed_top_k, reused_buffer, top_k
from trainer.saes.kernels.sparse import product_dtype, row_products
from trainer.saes.sparse_acts import Places

# Rows that stay in the cache.
PART = 256
# Rounding to bf16 changes a number by at most this share of it; and the fp32 sums of both products, for each of their
# terms, by this of the factors' norms.
ROUNDING, SUMMING = 2.0**-8, 2.0**-23


class Factors(NamedTuple):
    """Of the pre-activations x W_enc + b_enc: x [n_tokens, d_in], W_enc [d_in, d_sae]."""

    x: Tensor
    W_enc: Tensor
    b_enc: Tensor

    def product(self) -> Tensor:
        return reused_buffer.product(self.b_enc, self.x, self.W_enc)

    def product_of(self, rows: Tensor) -> Tensor:
        """That of some tokens, beside what is kept for the next product of all."""
        return torch.addmm(self.b_enc, self.x[rows], self.W_enc)

    def at(self, columns: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
        """The exact values at some places [n]."""
        products = row_products(self.x, self.W_enc.T, Places(columns, tokens, starts))
        return products.add_(self.b_enc.index_select(0, columns))


class Rough(NamedTuple):
    """The product of rounded factors, and by how much a token's values are off at most, but for their own rounding."""

    values: Tensor
    error: Tensor


class Candidates(NamedTuple):
    """Some of each token's largest: columns and exact values [n_tokens, n], in no order. Nothing that is not among them
    exceeds `ceiling` [n_tokens]; where that is a NaN, nothing is known."""

    columns: Tensor
    values: Tensor
    ceiling: Tensor

    def largest(self, k: int) -> Candidates:
        """The k largest of these; the ceiling is still that of what is not among all of them."""
        values, chosen = self.values.topk(k, dim=1, sorted=False)
        return Candidates(self.columns.gather(1, chosen), values, self.ceiling)


def pays(factors: Factors, n_seen: float) -> bool:
    """Whether a first look makes it faster to find values, so many of which per token are then computed exactly."""
    x = factors.x
    is_exact = x.dtype == product_dtype(x) == torch.float32
    return is_exact and x.device.type == "cpu" and first_look.pays(n_seen, factors.W_enc.shape[1])


def candidates(factors: Factors, n: int) -> Candidates:
    """n of each token that are the largest as it seems."""
    rough = _rough(factors)
    columns, lowest = packed_top_k.largest_of_each(rough.values, n)
    reused_buffer.put_back(rough.values)
    n_tokens = len(columns)
    tokens = torch.arange(n_tokens)
    exact = factors.at(columns.flatten(), tokens.repeat_interleave(n), tokens * n).view(n_tokens, n)
    ceiling = lowest * (1 + ROUNDING) + rough.error
    return Candidates(columns, exact, ceiling.masked_fill(~(lowest > 0), torch.inf))


def largest_of_each(factors: Factors, k: int) -> tuple[Tensor, Tensor]:
    """As `PreActs.largest`."""
    columns, values, ceiling = candidates(factors, first_look.MARGIN * k).largest(k)
    # Said so that it is true of a NaN.
    is_open = ~(ceiling <= values.amin(dim=1))
    if len(rows := is_open.nonzero().flatten()):
        whole = factors.product_of(rows)
        columns[rows] = top_k.of_each(whole, k)
        values[rows] = whole.gather(1, columns[rows])
    return columns, values


def largest_of_all(factors: Factors, n: int) -> tuple[Tensor, Tensor] | None:
    """As `PreActs.largest_of_all`; None where this way does not find them."""
    rough = _rough(factors)
    bound = top_k.guessed_bound(rough.values, n)
    floors = bound - abs(bound) * ROUNDING - rough.error
    flat = _not_below(rough.values, floors)
    reused_buffer.put_back(rough.values)
    n_tokens, d_sae = rough.values.shape
    # Of what is not looked at, nothing exceeds the bound.
    if not n <= len(flat) <= n_tokens * d_sae // first_look.COST:
        return None
    tokens = flat // d_sae
    exact = factors.at(flat - tokens * d_sae, tokens, torch.searchsorted(tokens, torch.arange(n_tokens)))
    is_chosen = top_k.are_largest(exact[None], n)[0][0]
    values = exact[is_chosen]
    return (flat[is_chosen], values) if bool(values.amin() >= bound) else None


def _rough(factors: Factors) -> Rough:
    x, W_enc, b_enc = factors
    rounded_x, norm, off = _rounded(x)
    rounded_W, norms_W, offs_W = _rounded(W_enc.T)
    rounded_b, norm_W = b_enc.bfloat16(), norms_W.amax()
    error = off * norm_W + (norm + off) * offs_W.amax() + (b_enc - rounded_b).abs().amax()
    error += SUMMING * x.shape[1] * norm * norm_W
    return Rough(reused_buffer.product(rounded_b, rounded_x, rounded_W.T), error)


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [n, d] in bf16, how long they are and how far that has moved them, [n] each.

    By parts that stay in a cache: with 16,384 latents in 8 ms instead of 11.
    """
    rounded = torch.empty_like(rows, dtype=torch.bfloat16)
    norms, offs = rows.new_empty(2, len(rows))
    for part, into, norm, off in zip(*(tensor.split(PART) for tensor in (rows, rounded, norms, offs)), strict=True):
        into.copy_(part)
        torch.linalg.vector_norm(part, dim=1, out=norm)
        torch.linalg.vector_norm(part - into, dim=1, out=off)
    return rounded, norms, offs


def _not_below(values: Tensor, floors: Tensor) -> Tensor:
    """Where values [n_tokens, d_sae] are at least their token's floor, as ascending numbers in the flattened matrix.

    Positive bf16 numbers are ordered as the integers of the same bits. Where a floor is not positive, all are given.
    """
    # The floor itself may be rounded up.
    bits = floors.bfloat16().view(torch.int16) - 1
    bits = bits.masked_fill(~(floors > 0), torch.iinfo(torch.int16).min)
    return top_k.numbers(np.greater_equal, values.view(torch.int16).numpy(), bits[:, None].numpy())
