"""Products with sparse activations: rows of active latents only, by Triton on a GPU and by embedding_bag elsewhere.

All three are sums over bags of rows. Decoding adds rows of W_dec for each token; the gradient of an activation is the
product of one row with its token's gradient; and a weight gradient adds, for each latent, rows of its tokens. On one
core at 4,096 tokens, d_in 384, d_sae 3,072 and k 32 these take 5, 7 and 8 ms where a dense product takes 80. A GPU
finds both gradients of decoding in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.parallel.group import Group, everybodys, part_summed
from trainer.runtime import row_measures
from trainer.runtime.narrow_copy import kept_or_own
from trainer.runtime.triton_kernels import working_kernels
from trainer.saes.sparse_acts import Acts, DenseActs, Filled, Places, SparseActs

# Makes gradients, those of what was decoded in the given type, from saved tensors and the gradients of sums.
MakeGradients = Callable[..., "Gradients"]

# Rows that take more memory are not read from a cache if they come in no order.
CACHE_BYTES = 2**24


def decode(acts: Acts, W_dec: Tensor, group: Group | None = None, n_levels: int = 0) -> Tensor:
    """Return acts W_dec [n_tokens, d_out]: for each token the sum of its active rows of W_dec [d_sae, d_out].

    Ranks of a `group` have the same tokens: each gets its `own_part` of the sum of what all have decoded. With
    `n_levels` tokens have as many rows in turn, of sparse activations; the result is [n_tokens, n_levels, d_out].
    """
    group = group or Group()
    if isinstance(acts, DenseActs):
        return part_summed(acts.values @ W_dec, group, gradient_dtype(W_dec))
    decoded: Tensor = _Decode.apply(acts.values, W_dec, acts.places, group, n_levels)  # type: ignore[no-untyped-call]
    return decoded


def gradient_dtype(W_dec: Tensor) -> torch.dtype | None:
    """Return the type in which ranks gather the gradient of what is decoded; None for its own.

    If W_dec learns, its gradient is computed in this type anyway. Ranks must agree on it, so it does not depend on the
    activations, of which one rank may keep so many that it takes dense products.
    """
    return _dtype_of_rows(W_dec) if W_dec.requires_grad else None


def _dtype_of_rows(W_dec: Tensor) -> torch.dtype:
    dtype = product_dtype(W_dec)
    return dtype if triton_for(W_dec, dtype) else W_dec.dtype


class _Decode(torch.autograd.Function):
    """Own gradients: embedding_bag's backward pass sorts by itself and takes 24 ms on one core where this takes 14."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, W_dec: Tensor, places: Places, group: Group, n_levels: int) -> Tensor:
        # Under autocast a GPU gathers half the bytes, sums in fp32 all the same, and finds more of them in its cache.
        dtype = _dtype_of_rows(W_dec)
        rows = kept_or_own(W_dec, dtype).to(dtype)
        ctx.save_for_backward(values, rows)
        ctx.places, ctx.W_dec, ctx.group = places, W_dec, group
        decoded = bag_sums(values, places.latents, places.starts, rows, places.filled)
        decoded = decoded.view(-1, n_levels, decoded.shape[1]) if n_levels else decoded
        ctx.n_tokens = len(decoded)
        if group.size == 1:
            return decoded
        own, transfers = group.start_part_of_sum(decoded)
        if transfers and ctx.needs_input_grad[1]:
            # The gradients need it; a GPU sorts while the transfer goes on.
            places.tokens_by_latent(len(rows))
        group.finish(transfers)
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, rows = ctx.saved_tensors
        acts, needed = SparseActs(values, ctx.places, len(rows)), ctx.needs_input_grad[:2]
        if ctx.group.size > 1:
            grad = everybodys(grad, ctx.n_tokens, ctx.group, rows.dtype if needed[1] else None)
        return *_gradients(acts, rows, ctx.W_dec, grad.flatten(end_dim=-2), needed), None, None, None


def _gradients(
    acts: SparseActs,
    rows: Tensor,
    W_dec: Tensor,
    grad: Tensor,
    needed: tuple[bool, bool],
    factor: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of activations and of W_dec, whose `rows` were read, from that of what was decoded.

    That is `grad`, times a `factor` (0-dim) where there is one.
    """
    grad_values: Tensor | None
    grad_W_dec: Tensor | None
    if all(needed):
        grad_W_dec, grad_values = both_products(acts, grad.to(rows.dtype), rows, W_dec, factor)
    else:
        grad = _times(grad, factor)
        grad_values = row_products(grad, rows, acts.places) if needed[0] else None
        grad_W_dec = transposed_product(acts, grad.to(rows.dtype)) if needed[1] else None
    return _to(grad_values, acts.values.dtype), _to(grad_W_dec, W_dec.dtype)


def _times(matrix: Tensor, factor: Tensor | None) -> Tensor:
    # As a vector: a single number a GPU would round to the type of the matrix.
    return matrix if factor is None else (matrix * factor.reshape(1)).to(matrix.dtype)


def _to(grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if grad is None else grad.to(dtype)


class Gradients(NamedTuple):
    """The gradients of what was decoded, `of_decoded` [..., d_out], and `of_offset` [d_out], which is added to it.

    The first is to be multiplied by `factor`, 0-dim; None for 1.
    """

    of_decoded: Tensor
    of_offset: Tensor
    factor: Tensor | None = None


class Decoded(NamedTuple):
    """What kernels decode, which keep no graph: `acts`, and W_dec as `rows` [d_sae, d_out] in the type of products.

    Whoever sums up errors of it calls `with_gradients`.
    """

    acts: SparseActs
    W_dec: Tensor
    rows: Tensor

    def with_gradients(
        self, offset: Tensor, gradients: MakeGradients, saved: tuple[Tensor, ...], sums: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return `sums`, 0-dim, known already, such that activations, W_dec and `offset` get a gradient from them.

        `gradients` makes them of `saved` and of those of the sums.
        """
        known: tuple[Tensor, ...] = _KnownSums.apply(  # type: ignore[no-untyped-call]
            self.acts.values, self.W_dec, offset, self.rows, self.acts.places, gradients, len(saved), *saved, *sums
        )
        return known


def decoded_by_kernels(acts: Acts, W_dec: Tensor) -> Decoded | None:
    """Return activations and rows for kernels, where they work and activations are sparse; else None."""
    dtype = product_dtype(W_dec)
    if isinstance(acts, DenseActs) or not triton_for(W_dec, dtype):
        return None
    return Decoded(acts, W_dec, kept_or_own(W_dec, dtype).to(dtype).detach())


class _KnownSums(torch.autograd.Function):
    """Sums over what was decoded, from whose gradients that of x_hat is written at once in the type of products.

    Autograd would write it in fp32, read that for the gradient of the offset and once more to narrow it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        W_dec: Tensor,
        offset: Tensor,
        rows: Tensor,
        places: Places,
        gradients: MakeGradients,
        n_saved: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(values, rows, *tensors[:n_saved])
        ctx.places, ctx.W_dec, ctx.gradients, ctx.n_others = places, W_dec, gradients, 4 + len(tensors)
        return tuple(one.view_as(one) for one in tensors[n_saved:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, rows, *saved = ctx.saved_tensors
        of_decoded, of_offset, factor = ctx.gradients(*saved, *grads, rows.dtype)
        acts, needed = SparseActs(values, ctx.places, len(rows)), ctx.needs_input_grad[:2]
        # Each level of a token has its own.
        of_decoded = of_decoded.flatten(end_dim=-2)
        return *_gradients(acts, rows, ctx.W_dec, of_decoded, needed, factor), of_offset, *[None] * ctx.n_others


def transposed_product(acts: SparseActs, dense: Tensor) -> Tensor:
    """Return actsᵀ dense [d_sae, d] for `dense` [n_tokens, d]; read only the rows of active tokens.

    The sums are fp32 or wider. Their order is fixed, unless a latent has many tokens: a GPU shares those among several
    programs, which torch's deterministic mode forbids.
    """
    if triton := triton_for(dense):
        sums: Tensor = _summed(triton, acts, dense, None, None).sums
        return sums
    order, starts = acts.places.by_latent(acts.d_sae)
    # index_select, since indexing with one tensor takes three times as long on a CPU.
    tokens, values = acts.places.tokens_by_latent(acts.d_sae), acts.values.index_select(0, order)
    return bag_sums(values, tokens, starts, dense)


def by_latent(acts: SparseActs, dense: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `transposed_product` and the sum of each latent's activations [d_sae].

    Of `weights`, which have this gradient, a GPU may measure it.
    """
    if triton := triton_for(dense):
        summed = _summed(triton, acts, dense, None, weights)
        return summed.sums, summed.totals
    totals = acts.values.new_zeros(acts.d_sae).index_add_(0, acts.places.latents, acts.values)
    return transposed_product(acts, dense), totals


def both_products(
    acts: SparseActs, dense: Tensor, rows: Tensor, weights: Tensor | None = None, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `transposed_product` of `dense` and its `row_products` with `rows` [d_sae, d].

    Where there is a `factor` (0-dim), they are those of `dense` times it. A GPU gathers rows of `dense` once for both.
    """
    if triton := triton_for(dense):
        summed = _summed(triton, acts, dense, rows, weights, factor)
        return summed.sums, summed.products
    dense = _times(dense, factor)
    return transposed_product(acts, dense), row_products(dense, rows, acts.places)


def _summed(
    triton: ModuleType,
    acts: SparseActs,
    dense: Tensor,
    rows: Tensor | None,
    weights: Tensor | None,
    factor: Tensor | None = None,
) -> Any:
    splits, measures, measured = not torch.are_deterministic_algorithms_enabled(), None, None
    if weights is not None and (measures := row_measures.of(weights)):
        unit_rows = None if measures.dots is None else weights.detach()
        measured = triton.Measured(measures.squares, measures.dots, unit_rows)
    summed = triton.sum_by_latent(acts, dense, rows, factor, splits=splits, measured=measured)
    if measures:
        measures.note(summed.sums, summed.shared)
    return summed


def bag_sums(values: Tensor, indices: Tensor, starts: Tensor, rows: Tensor, filled: Filled | None = None) -> Tensor:
    """Sum values[i] · rows[indices[i]] over each bag's entries: [n_bags, d]; bag b's entries begin at `starts[b]`.

    The sum is fp32 or wider and has a fixed order. Entries that are not `filled`, where that is told, have the value 0.
    """
    if triton := triton_for(rows):
        sums: Tensor = triton.bag_sums(values, indices, starts, rows, filled)
        return sums
    # Entries that do not count add nothing to the last bag.
    return F.embedding_bag(indices, rows.to(values.dtype), starts, per_sample_weights=values, mode="sum")


def row_products(dense: Tensor, rows: Tensor, places: Places) -> Tensor:
    """Return each entry's inner product of its token's row of `dense` [n_tokens, d] and its latent's of `rows`: [n].

    For entries that do not count it may be any finite number.
    """
    if triton := triton_for(rows):
        by_kernel: Tensor = triton.row_products(dense, rows, places.latents, places.starts, places.filled)
        return by_kernel
    if _is_read_faster_by_latent(dense, rows, places):
        order, starts = places.by_latent(len(rows))
        latents, tokens = places.latents.index_select(0, order), places.tokens_by_latent(len(rows))
        products = _row_products(rows.to(dense.dtype), dense, tokens, latents, starts)
        return products.new_empty(len(order)).index_copy_(0, order, products)
    return _row_products(dense, rows.to(dense.dtype), places.latents, places.tokens, places.starts)


def _is_read_faster_by_latent(dense: Tensor, rows: Tensor, places: Places) -> bool:
    """Tell whether a CPU that goes through the entries by latent, not by token, finds more of what it reads in a cache.

    With 4,096 tokens, d 384 and k 64 it takes 22 ms of a core instead of 40 at 16,384 latents, 20 instead of 16 at
    3,072, the sort included; with fewer entries than latents it gains nothing.
    """
    exceeds_cache = rows.nbytes > max(CACHE_BYTES, dense.nbytes) and not rows.is_cuda
    return exceeds_cache and len(places.latents) >= len(rows)


def _row_products(dense: Tensor, rows: Tensor, indices: Tensor, bags: Tensor, starts: Tensor) -> Tensor:
    """Return the inner products of `rows[indices[i]]` and `dense[bags[i]]`: [n]; bag b's entries begin at `starts[b]`.

    It is what autograd calls for embedding_bag, without a second forward pass. Gathering the rows for a batched product
    takes 23 times as long.
    """
    backward = torch.ops.aten._embedding_bag_per_sample_weights_backward
    products: Tensor = backward(dense, rows, indices, starts, bags, mode=0)
    return products


def dots(rows: Tensor, others: Tensor) -> Tensor:
    """Return the inner products of two matrices' rows of the same number, both [n, d]: [n].

    For 16,384 rows of 768 a core takes 4 ms, where torch's einsum takes 15.
    """
    if rows.is_cuda:
        return torch.einsum("ij,ij->i", rows, others)
    numbers = torch.arange(len(rows))
    return _row_products(rows, others, numbers, numbers, numbers)


def weighted_sum(weights: Tensor, rows: Tensor, factor: float) -> Tensor:
    """Return factor · Σ weights[i] · rows[i] of rows [n, d], which may be in 16 bits: [d], in the weights' type.

    What a GPU reads in 16 bits it adds in fp32, unlike torch's own product, which would also round the weights.
    """
    if rows.dtype == weights.dtype or not (triton := triton_for(rows)):
        return factor * (rows.T.to(weights.dtype) @ weights)
    sums: Tensor = triton.weighted_sum(weights, rows, factor)
    return sums


def product_dtype(like: Tensor) -> torch.dtype:
    """Return the type in which `like` is multiplied under the present autocast setting."""
    kind = like.device.type
    narrows = like.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if narrows else like.dtype


def triton_for(rows: Tensor, dtype: torch.dtype | None = None) -> ModuleType | None:
    """Return the Triton kernels where they work for rows of this type or of `dtype`, which is never float64; else None.

    They work on a GPU.
    """
    dtype = dtype or rows.dtype
    return _working_triton(rows.device, dtype) if rows.is_cuda and dtype != torch.float64 else None


def _working_triton(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    return working_kernels("trainer.saes.kernels.triton_sparse", device, dtype)
