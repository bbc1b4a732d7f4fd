"""Products with sparse activations that read only the rows of active latents.

The products use Triton kernels on a GPU, and `embedding_bag` elsewhere. All three products operate on bags of rows.
Decoding sums, for each token, the rows of W_dec of its active latents. An activation's gradient is the inner product of
its row of W_dec with its token's gradient. For each latent, the weight gradient is a weighted sum of the rows for the
tokens on which the latent is active. On one core with 4,096 tokens, d_in = 384, d_sae = 3,072 and k = 32, these matmuls
take 5, 7 and 8 ms; a dense matmul takes 80 ms. A GPU computes both gradients of decoding in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.parallel.group import Group, all_gather, part_dtype, reduce_scatter
from trainer.runtime import row_measures
from trainer.runtime.narrow_copy import kept_or_own
from trainer.runtime.triton_kernels import SPARSE_PRODUCTS
from trainer.saes.sparse_acts import Acts, DenseActs, Filled, SparseActs, SparseIndices

# A function that computes gradients in a given dtype from saved tensors and the gradients of the sums.
MakeGradients = Callable[..., "DecoderGradients"]

# A larger matrix does not stay in the cache if its rows are read in random order.
CACHE_BYTES = 2**24


def decode(acts: Acts, W_dec: Tensor, group: Group | None = None, n_levels: int = 0) -> Tensor:
    """Return acts @ W_dec [n_tokens, d_out]: the weighted sum of each token's active rows of W_dec [d_sae, d_out].

    Ranks in a `group` have the same tokens, and each rank gets its `local_shard` of the sum over ranks. With
    `n_levels`, each group of `n_levels` consecutive token indices in the sparse activations represents the levels of
    one token; the result is then [n_tokens, n_levels, d_out].
    """
    group = group or Group()
    if isinstance(acts, DenseActs):
        return reduce_scatter(acts.values @ W_dec, group, gradient_dtype(W_dec))
    decoded: Tensor = _Decode.apply(acts.values, W_dec, acts.indices, group, n_levels)  # type: ignore[no-untyped-call]
    return decoded


def gradient_dtype(W_dec: Tensor) -> torch.dtype | None:
    """Return the dtype in which ranks gather the gradient of the decoded values, or None to keep its dtype.

    If W_dec is trained, its gradient is computed in this dtype anyway. Ranks must agree on the dtype, so it must not
    depend on the activations, even though a rank with many active latents uses dense matmuls.
    """
    return _dtype_of_rows(W_dec) if W_dec.requires_grad else None


def _dtype_of_rows(W_dec: Tensor) -> torch.dtype:
    dtype = product_dtype(W_dec)
    return dtype if SPARSE_PRODUCTS.on(W_dec, dtype) else W_dec.dtype


class _Decode(torch.autograd.Function):
    """Decoding with custom gradients.

    The backward pass of `embedding_bag` includes a sort and takes 24 ms on one core; this backward pass takes 14 ms.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, W_dec: Tensor, indices: SparseIndices, group: Group, n_levels: int) -> Tensor:
        # Under autocast, use 16-bit rows: they halve the number of bytes that a GPU gathers, and fit better into its
        # cache. Additions are in fp32 in any case.
        dtype = _dtype_of_rows(W_dec)
        rows = kept_or_own(W_dec, dtype).to(dtype)
        ctx.save_for_backward(values, rows)
        ctx.indices, ctx.W_dec, ctx.group = indices, W_dec, group
        sent = part_dtype(gradient_dtype(W_dec)) if group.size > 1 else None
        decoded = bag_sums(values, indices.latents, indices.starts, rows, indices.filled, sent)
        decoded = decoded.view(-1, n_levels, decoded.shape[1]) if n_levels else decoded
        ctx.n_tokens = len(decoded)
        if group.size == 1:
            return decoded
        own, transfers = group.start_part_of_sum(decoded)
        if transfers and ctx.needs_input_grad[1]:
            # Sort now, since the gradients need the sorted entries, and a GPU overlaps the sort with the transfer.
            indices.tokens_by_latent(len(rows))
        group.finish(transfers)
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, rows = ctx.saved_tensors
        acts, needed = SparseActs(values, ctx.indices, len(rows)), ctx.needs_input_grad[:2]
        if ctx.group.size > 1:
            grad = all_gather(grad, ctx.n_tokens, ctx.group, rows.dtype if needed[1] else None)
        return *_gradients(acts, rows, ctx.W_dec, grad.flatten(end_dim=-2), needed), None, None, None


def _gradients(
    acts: SparseActs,
    rows: Tensor,
    W_dec: Tensor,
    grad: Tensor,
    needed: tuple[bool, bool],
    factor: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the activations and of W_dec; `rows` is the copy of W_dec that the forward pass used.

    The gradient of the decoded values is `grad`, times `factor` (0-dim) if given.
    """
    grad_values: Tensor | None
    grad_W_dec: Tensor | None
    if all(needed):
        grad_W_dec, grad_values = both_products(acts, grad.to(rows.dtype), rows, W_dec, factor)
    else:
        grad = _times(grad, factor)
        grad_values = row_products(grad, rows, acts.indices) if needed[0] else None
        grad_W_dec = transposed_product(acts, grad.to(rows.dtype)) if needed[1] else None
    return _to(grad_values, acts.values.dtype), _to(grad_W_dec, W_dec.dtype)


def _times(matrix: Tensor, factor: Tensor | None) -> Tensor:
    # Reshape the factor to [1], since a GPU would round a 0-dim factor to the matrix's dtype.
    return matrix if factor is None else (matrix * factor.reshape(1)).to(matrix.dtype)


def _to(grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if grad is None else grad.to(dtype)


class DecoderGradients(NamedTuple):
    """The gradients of the decoded values, `of_decoded` [..., d_out], and of the offset, `of_offset` [d_out].

    `of_decoded` still has to be multiplied by `factor` (0-dim), unless the factor is None.
    """

    of_decoded: Tensor
    of_offset: Tensor
    factor: Tensor | None = None


class Decoded(NamedTuple):
    """Inputs for kernels that decode without autograd; `rows` is W_dec [d_sae, d_out] in the matmul dtype.

    After computing sums over the decoded values, pass them to `with_gradients`, which makes them differentiable.
    """

    acts: SparseActs
    W_dec: Tensor
    rows: Tensor

    def with_gradients(
        self, offset: Tensor, gradients: MakeGradients, saved: tuple[Tensor, ...], sums: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the precomputed 0-dim `sums`, differentiable with respect to the activations, W_dec and `offset`.

        The function `gradients` computes these gradients from `saved` and the gradients of the sums.
        """
        known: tuple[Tensor, ...] = _KnownSums.apply(  # type: ignore[no-untyped-call]
            self.acts.values, self.W_dec, offset, self.rows, self.acts.indices, gradients, len(saved), *saved, *sums
        )
        return known


def decoded_by_kernels(acts: Acts, W_dec: Tensor) -> Decoded | None:
    """Return the inputs of the decoding kernels, or None if the kernels do not work or the activations are dense."""
    dtype = product_dtype(W_dec)
    if isinstance(acts, DenseActs) or not SPARSE_PRODUCTS.on(W_dec, dtype):
        return None
    return Decoded(acts, W_dec, kept_or_own(W_dec, dtype).to(dtype).detach())


class _KnownSums(torch.autograd.Function):
    """Precomputed sums over decoded values; the gradient of x_hat is written directly in the matmul dtype.

    Autograd would write this gradient in fp32, read it for the offset's gradient, and read it again for the conversion.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        W_dec: Tensor,
        offset: Tensor,
        rows: Tensor,
        indices: SparseIndices,
        gradients: MakeGradients,
        n_saved: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(values, rows, *tensors[:n_saved])
        ctx.indices, ctx.W_dec, ctx.gradients, ctx.n_others = indices, W_dec, gradients, 4 + len(tensors)
        return tuple(one.view_as(one) for one in tensors[n_saved:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, rows, *saved = ctx.saved_tensors
        of_decoded, of_offset, factor = ctx.gradients(*saved, *grads, rows.dtype)
        acts, needed = SparseActs(values, ctx.indices, len(rows)), ctx.needs_input_grad[:2]
        # Each level of a token has its own gradient.
        of_decoded = of_decoded.flatten(end_dim=-2)
        return *_gradients(acts, rows, ctx.W_dec, of_decoded, needed, factor), of_offset, *[None] * ctx.n_others


def transposed_product(acts: SparseActs, dense: Tensor) -> Tensor:
    """Return actsᵀ @ dense [d_sae, d] for `dense` [n_tokens, d]; read only the rows of active tokens.

    The sums are fp32 or wider. The order of the additions is fixed, except for latents with many tokens: a GPU splits
    such sums among several programs, unless torch is in deterministic mode.
    """
    if triton := SPARSE_PRODUCTS.on(dense):
        sums: Tensor = _summed(triton, acts, dense, None, None).sums
        return sums
    order, starts = acts.indices.by_latent(acts.d_sae)
    # On CPU, indexing with a tensor takes three times as long as `index_select`.
    tokens, values = acts.indices.tokens_by_latent(acts.d_sae), acts.values.index_select(0, order)
    return bag_sums(values, tokens, starts, dense)


def by_latent(acts: SparseActs, dense: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `transposed_product` and the sum of each latent's activations [d_sae].

    `weights` are the parameters whose gradient is this product. On a GPU, the gradient's row norms may also be recorded
    for these parameters.
    """
    if triton := SPARSE_PRODUCTS.on(dense):
        summed = _summed(triton, acts, dense, None, weights)
        return summed.sums, summed.totals
    totals = acts.values.new_zeros(acts.d_sae).index_add_(0, acts.indices.latents, acts.values)
    return transposed_product(acts, dense), totals


def both_products(
    acts: SparseActs, dense: Tensor, rows: Tensor, weights: Tensor | None = None, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `transposed_product` of `dense` and its `row_products` with `rows` [d_sae, d].

    `dense` is multiplied by `factor` (0-dim) if given. A GPU gathers the rows of `dense` only once for both products.
    """
    if triton := SPARSE_PRODUCTS.on(dense):
        summed = _summed(triton, acts, dense, rows, weights, factor)
        return summed.sums, summed.products
    dense = _times(dense, factor)
    return transposed_product(acts, dense), row_products(dense, rows, acts.indices)


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
        measured = triton.SumBuffers(measures.squares, measures.dots, unit_rows)
    summed = triton.sum_by_latent(acts, dense, rows, factor, splits=splits, measured=measured)
    if measures:
        measures.note(summed.sums, summed.shared)
    return summed


def bag_sums(
    values: Tensor,
    indices: Tensor,
    starts: Tensor,
    rows: Tensor,
    filled: Filled | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the sum of values[i] · rows[indices[i]] over each bag, [n_bags, d]; bag b starts at entry `starts[b]`.

    The sums are computed in fp32 or wider, and returned in `dtype` if given. The order of the additions is fixed.
    Entries beyond the `filled` ones must have the value 0.
    """
    if triton := SPARSE_PRODUCTS.on(rows):
        sums: Tensor = triton.bag_sums(values, indices, starts, rows, filled, dtype or torch.float32)
        return sums
    # Padding entries add 0 to the last bag.
    summed = F.embedding_bag(indices, rows.to(values.dtype), starts, per_sample_weights=values, mode="sum")
    return summed if dtype is None else summed.to(dtype)


def row_products(dense: Tensor, rows: Tensor, indices: SparseIndices) -> Tensor:
    """Return the inner product of each entry's rows in `dense` [n_tokens, d] and `rows` [d_sae, d], as [n].

    The result for a padding entry is an arbitrary finite number.
    """
    if triton := SPARSE_PRODUCTS.on(rows):
        by_kernel: Tensor = triton.row_products(dense, rows, indices.latents, indices.starts, indices.filled)
        return by_kernel
    if _is_read_faster_by_latent(dense, rows, indices):
        order, starts = indices.by_latent(len(rows))
        latents, tokens = indices.latents.index_select(0, order), indices.tokens_by_latent(len(rows))
        products = _row_products(rows.to(dense.dtype), dense, tokens, latents, starts)
        return products.new_empty(len(order)).index_copy_(0, order, products)
    return _row_products(dense, rows.to(dense.dtype), indices.latents, indices.tokens, indices.starts)


def _is_read_faster_by_latent(dense: Tensor, rows: Tensor, indices: SparseIndices) -> bool:
    """Return whether a CPU uses its cache better when it reads the entries by latent instead of by token.

    For 4,096 tokens, d = 384 and k = 64 on one core, including the sort, reading by latent takes 22 ms instead of 40 ms
    with 16,384 latents, but 20 ms instead of 16 ms with 3,072. If there are fewer entries than latents, reading by
    latent saves no time.
    """
    exceeds_cache = rows.nbytes > max(CACHE_BYTES, dense.nbytes) and not rows.is_cuda
    return exceeds_cache and len(indices.latents) >= len(rows)


def _row_products(dense: Tensor, rows: Tensor, indices: Tensor, bags: Tensor, starts: Tensor) -> Tensor:
    """Return the inner products of `rows[indices[i]]` and `dense[bags[i]]`, [n]; bag b starts at entry `starts[b]`.

    Autograd calls the same operation for `embedding_bag`; calling it directly avoids a second forward pass. Gathering
    the rows for a batched product would take 23 times as long.
    """
    backward = torch.ops.aten._embedding_bag_per_sample_weights_backward
    products: Tensor = backward(dense, rows, indices, starts, bags, mode=0)
    return products


def dots(rows: Tensor, others: Tensor) -> Tensor:
    """Return the inner product [n] of each pair of rows with the same index in two matrices [n, d].

    For 16,384 rows of 768, this takes 4 ms on one core; torch's `einsum` takes 15 ms.
    """
    if rows.is_cuda:
        return torch.einsum("ij,ij->i", rows, others)
    numbers = torch.arange(len(rows))
    return _row_products(rows, others, numbers, numbers, numbers)


def weighted_sum(weights: Tensor, rows: Tensor, factor: float) -> Tensor:
    """Return factor · Σ weights[i] · rows[i] for rows [n, d], which may be 16-bit: [d], in the dtype of the weights.

    A GPU kernel reads 16-bit rows and sums in fp32; torch's own product would also round the weights to 16 bits.
    """
    if rows.dtype == weights.dtype or not (triton := SPARSE_PRODUCTS.on(rows)):
        return factor * (rows.T.to(weights.dtype) @ weights)
    sums: Tensor = triton.weighted_sum(weights, rows, factor)
    return sums


def product_dtype(like: Tensor) -> torch.dtype:
    """Return the dtype in which `like` is multiplied under the current autocast setting."""
    kind = like.device.type
    narrows = like.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if narrows else like.dtype
