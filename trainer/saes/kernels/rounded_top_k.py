"""Finds the largest pre-activations with a bf16 matmul, and then computes exact values for the candidates only.

A CPU with hardware support for bf16 computes bf16 matmuls eight times as fast as fp32 matmuls. A rounded product's
error is bounded: |x·w − x̃·w̃| ≤ ‖x − x̃‖ ‖w‖ + ‖x̃‖ ‖w − w̃‖. If a rounded value is below the k-th largest exact value
by more than this bound, its exact value is not among the k largest. If too few values can be ruled out, the exact
product is computed, so the result never depends on the rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.contract.planning import first_look
from trainer.saes.kernels import packed_top_k, reused_buffer, top_k
from trainer.saes.kernels.sparse import product_dtype, row_products
from trainer.saes.sparse_acts import SparseIndices

# The number of rows per chunk, small enough that a chunk stays in the cache.
PART = 512
# Rounding to bf16 changes a number by at most `ROUNDING` times its size. In both products, each term adds an error of
# at most `SUMMING` times the product of the factors' norms to the fp32 sums.
ROUNDING, SUMMING = 2.0**-8, 2.0**-23


class Factors(NamedTuple):
    """The factors of the pre-activations x W_enc + b_enc: x [n_tokens, d_in], W_enc [d_in, d_sae]."""

    x: Tensor
    W_enc: Tensor
    b_enc: Tensor

    def product(self) -> Tensor:
        return reused_buffer.product(self.b_enc, self.x, self.W_enc)

    def product_of(self, rows: Tensor) -> Tensor:
        """Return the pre-activations of the given tokens, without using the buffer that full matmuls reuse."""
        return torch.addmm(self.b_enc, self.x[rows], self.W_enc)

    def at(self, columns: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
        """Return the exact values at the given positions [n]."""
        products = row_products(self.x, self.W_enc.T, SparseIndices(columns, tokens, starts))
        return products.add_(self.b_enc.index_select(0, columns))


class Rough(NamedTuple):
    """The product of rounded factors, with bounds on its errors.

    `values` [n_tokens, d_sae] differ from the exact values by at most `per_norm` [n_tokens] times the latents' `norms`
    [d_sae], plus `offset` (0-dim). This bound does not include the error from rounding the product itself.
    """

    values: Tensor
    per_norm: Tensor
    norms: Tensor
    offset: Tensor

    def errors_at(self, columns: Tensor) -> Tensor:
        """Return error bounds at the given columns [n_tokens, n]."""
        norms = self.norms.index_select(0, columns.flatten()).view(columns.shape)
        return norms.mul_(self.per_norm[:, None]).add_(self.offset)

    @property
    def largest_errors(self) -> Tensor:
        """The largest error bound for each token, [n_tokens]."""
        return self.per_norm * self.norms.amax() + self.offset


class Candidates(NamedTuple):
    """Large values for each token: columns and exact values [n_tokens, n], in no particular order.

    No other value of a token exceeds its `ceiling` [n_tokens]; if the ceiling is NaN, the other values are unknown.
    """

    columns: Tensor
    values: Tensor
    ceiling: Tensor

    @property
    def lower(self) -> Tensor:
        """Lower bounds of the values, as in `FirstLook`: the exact values themselves."""
        return self.values

    def exact(self, least: Tensor) -> Candidates:
        return self

    def largest(self, n: int) -> Candidates:
        """Return the n largest of these candidates, or all if there are no more than n."""
        if n >= self.values.shape[1]:
            return self
        values, chosen = self.values.topk(n, dim=1, sorted=False)
        return Candidates(self.columns.gather(1, chosen), values, self.ceiling.maximum(values.amin(dim=1)))


class FirstLook(NamedTuple):
    """The largest values for each token, as found in the rounded product.

    `columns` and the bounds of the exact values, `lower` and `upper`, are [n_tokens, n]. No other value exceeds
    `ceiling` [n_tokens].
    """

    factors: Factors
    columns: Tensor
    lower: Tensor
    upper: Tensor
    ceiling: Tensor

    def exact(self, least: Tensor) -> Candidates:
        """Return the candidates with exact values; values that must be below `least` [n_tokens] become −inf."""
        # The negated comparison is True for NaN.
        flat, tokens, starts = top_k.marked(~(self.upper < least[:, None]))
        exact = self.factors.at(self.columns.flatten().index_select(0, flat), tokens, starts)
        values = torch.full_like(self.upper, -torch.inf)
        values.view(-1).index_copy_(0, flat, exact)
        return Candidates(self.columns, values, self.ceiling)


def may_be_used(factors: Factors) -> bool:
    """Return whether the product is fp32 and is computed on a CPU that is faster with bf16."""
    x = factors.x
    is_exact = x.dtype == product_dtype(x) == torch.float32
    return is_exact and x.device.type == "cpu" and first_look.costs() is not None


def pays(factors: Factors, n_exact: float, *, of_batch: bool = False) -> bool:
    """Return whether a rounded product saves time if `n_exact` values per token are then computed exactly.

    With `of_batch`, the largest values over all tokens are needed; otherwise, the largest values per token.
    """
    return may_be_used(factors) and first_look.pays(n_exact, factors.W_enc.shape[1], of_batch=of_batch)


def look(factors: Factors, n: int) -> FirstLook:
    """Find the n largest values for each token in the rounded product."""
    rough = _rough(factors)
    columns, values = packed_top_k.largest_of_each(rough.values, n)
    reused_buffer.put_back(rough.values)
    off = rough.errors_at(columns).add_(values.abs(), alpha=ROUNDING)
    ceiling = values[:, 0].clamp_min(0) * (1 + ROUNDING) + rough.largest_errors
    return FirstLook(factors, columns, values - off, values + off, ceiling)


def largest_of_each(factors: Factors, k: int) -> tuple[Tensor, Tensor]:
    """Implement `PreActs.largest`."""
    looked = look(factors, first_look.n_seen(k, 1))
    columns, values, ceiling = looked.exact(top_k.kth(looked.lower, k)).largest(k)
    # The negated comparison is True for NaN.
    is_open = ~(ceiling <= values.amin(dim=1))
    if len(rows := is_open.nonzero().flatten()):
        whole = factors.product_of(rows)
        columns[rows] = top_k.of_each(whole, k)
        values[rows] = whole.gather(1, columns[rows])
    return columns, values


def largest_of_all(factors: Factors, n: int) -> tuple[Tensor, Tensor] | None:
    """Implement `PreActs.largest_of_all`; return None if the rounded product rules out too few values."""
    rough = _rough(factors)
    bound = top_k.guessed_bound(rough.values, n)
    floors = bound - abs(bound) * ROUNDING - rough.largest_errors
    flat = _not_below(rough.values, floors)
    reused_buffer.put_back(rough.values)
    n_tokens, d_sae = rough.values.shape
    cost = first_look.costs()
    most = n_tokens * d_sae // cost.alone if cost else len(flat)
    # No value outside `flat` exceeds the bound.
    if not n <= len(flat) <= most:
        return None
    tokens = flat // d_sae
    exact = factors.at(flat - tokens * d_sae, tokens, torch.searchsorted(tokens, torch.arange(n_tokens)))
    is_chosen = top_k.are_largest(exact[None], n)[0][0]
    values = exact[is_chosen]
    return (flat[is_chosen], values) if bool(values.amin() >= bound) else None


def _rough(factors: Factors) -> Rough:
    x, W_enc, b_enc = factors
    rounded_x, norms, offs = _round_rows(x)
    rounded_W, norms_W, offs_W = _round_rows(W_enc.T)
    rounded_b = b_enc.bfloat16()
    # A latent whose weights are all 0 has no rounding error.
    share_W = (offs_W / norms_W.clamp_min(torch.finfo(norms_W.dtype).tiny)).amax()
    per_norm = offs + (norms + offs) * share_W + SUMMING * x.shape[1] * norms
    values = reused_buffer.product(rounded_b, rounded_x, rounded_W.T)
    return Rough(values, per_norm, norms_W, (b_enc - rounded_b).abs().amax())


def _round_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round rows [n, d] to bf16; return the result, the norms [n] of the rows and the norms [n] of their errors.

    The rows are processed in chunks that stay in the cache: 16,384 latents take 5 ms instead of 11 ms.
    """
    rounded = torch.empty_like(rows, dtype=torch.bfloat16)
    norms, offs = rows.new_empty(2, len(rows))
    off_of_part = rows.new_empty(min(PART, len(rows)), rows.shape[1])
    for part, into, norm, off in zip(*(tensor.split(PART) for tensor in (rows, rounded, norms, offs)), strict=True):
        into.copy_(part)
        torch.linalg.vector_norm(part, dim=1, out=norm)
        # Subtracting tensors of different dtypes directly would take longer.
        torch.linalg.vector_norm(off_of_part[: len(part)].copy_(into).sub_(part), dim=1, out=off)
    return rounded, norms, offs


def _not_below(values: Tensor, floors: Tensor) -> Tensor:
    """Return ascending flat indices of the values [n_tokens, d_sae] that are at or above their token's floor.

    Positive bf16 numbers are ordered like the integers with the same bits. If a token's floor is not positive, all of
    its values are returned.
    """
    # Subtract 1 because the floor may have been rounded up.
    bits = floors.bfloat16().view(torch.int16) - 1
    bits = bits.masked_fill(~(floors > 0), torch.iinfo(torch.int16).min)
    return top_k.numbers(np.greater_equal, values.view(torch.int16).numpy(), bits[:, None].numpy())
