"""Selects the pre-activations to decode."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.sparse_acts import SparseIndices, marked_in_columns

# Positions in the matrix of pre-activations, and the values [n] at these positions.
Chosen = tuple[SparseIndices, Tensor]


def k_per_token(pre_acts: PreActs, k: int) -> Chosen:
    """Choose the k largest pre-activations for each token."""
    columns, values = pre_acts.largest(k)
    starts = torch.arange(0, columns.numel(), k, device=columns.device)
    return SparseIndices(columns.flatten(), None, starts), values.flatten()


def k_per_batch(pre_acts: PreActs, k: float) -> Chosen:
    """Choose the k · n_tokens largest pre-activations in a batch, ordered by token and latent.

    Some tokens may have no chosen pre-activation.
    """
    n_tokens, d_sae = pre_acts.shape
    flat, values = pre_acts.largest_of_all(min(round(k * n_tokens), n_tokens * d_sae))
    return places_of(flat, n_tokens, d_sae), values


def above(pre_acts: PreActs, bound: Tensor | float) -> Chosen | None:
    """Choose the values above a bound (a number, 0-dim or [d_sae]), and every NaN, since NaN must not become inactive.

    Return None if a dense matmul is faster. On a GPU, the host waits for the number of values, so do not use this
    function in training.
    """
    matrix = pre_acts.matrix
    if isinstance(bound, Tensor) and matrix.dtype.itemsize == 2:
        # Torch would round the bound to the nearest number, and an fp32 copy of the matrix would take twice the
        # matrix's memory.
        bound = rounded_down(bound, matrix.dtype)
    indices = where(~(matrix <= bound))
    return None if indices is None else (indices, _at(matrix, indices))


def rounded_down(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest numbers in a 16-bit dtype that do not exceed `bound`.

    A value of that dtype exceeds `bound` if and only if it exceeds the rounded bound.
    """
    nearest = bound.detach().to(dtype)
    bits = nearest.view(torch.int16)
    # Larger bits mean a larger positive number, but a smaller negative number. The next number below 0 is the negative
    # number closest to 0.
    below = torch.where(nearest > 0, bits - 1, torch.where(nearest < 0, bits + 1, -(2**15) + 1)).view(dtype)
    return torch.where(nearest.to(bound.dtype) > bound, below, nearest)


def where(mask: Tensor) -> SparseIndices | None:
    """Return the positions marked in a bool mask [n_tokens, d_sae], or None if a dense matmul is faster.

    On CPU, a matmul takes about 16 times as long per sparse entry as per dense entry.
    """
    # numpy takes a third of torch's time to count and find the marked elements.
    n_marked = int(n_marked_in(mask)) if mask.is_cuda else np.count_nonzero(mask.numpy())
    if n_marked * 16 > mask.numel():
        return None
    return places_of(numbers(mask), *mask.shape)


def n_marked_in(mask: Tensor) -> Tensor:
    """Return the number of marked elements in a bool mask [n_tokens, d_sae], float64, 0-dim."""
    return marked_in_columns(mask).sum(dtype=torch.float64)


def numbers(mask: Tensor) -> Tensor:
    """Return ascending indices of the marked elements in the flattened mask."""
    return mask.flatten().nonzero().flatten() if mask.is_cuda else torch.from_numpy(np.flatnonzero(mask.numpy()))


def places_of(flat: Tensor, n_tokens: int, d_sae: int) -> SparseIndices:
    """Convert ascending indices into the flattened [n_tokens, d_sae] matrix to `SparseIndices`."""
    tokens = flat // d_sae
    starts = torch.searchsorted(tokens, torch.arange(n_tokens, device=flat.device))
    return SparseIndices(torch.sub(flat, tokens, alpha=d_sae), tokens, starts)


def _at(matrix: Tensor, indices: SparseIndices) -> Tensor:
    # Indexing with two tensors would take five times as long on CPU.
    return matrix.flatten().index_select(0, indices.tokens * matrix.shape[1] + indices.latents)
