"""Counts, step by step, the tokens on which each latent fired and the tokens since it last fired, and sums errors."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.runtime.triton_kernels import TOKENS_SINCE_FIRED
from trainer.saes.sparse_acts import Acts, SparseActs

# A lower bound on the variance: AuxK divides by the variance, and a perfect SAE would have a variance of 0.
LEAST_VARIANCE = 1e-12


@torch.no_grad()
def count(sums: Tensor, acts: Acts, n_tokens: int, *numbers: Tensor) -> Tensor:
    """Add each latent's firing count, the number of tokens, and m scalars (0-dim) to `sums` [n + 1 + m].

    Return the firing counts [n] for this pass; fp32 stores counts up to 16 million exactly.
    """
    if isinstance(acts, SparseActs) and (triton := TOKENS_SINCE_FIRED.on(sums)):
        by_kernel: Tensor = triton.count(sums, acts, n_tokens, numbers)
        return by_kernel
    fired = acts.count_by_latent(acts.values > 0)
    # Concatenate, so that a single addition suffices. `new_full` fills on the device; a copy from the host would stall
    # the stream.
    beside = fired.new_full((1,), n_tokens), *(number.reshape(1) for number in numbers)
    sums += torch.cat([fired, *beside])
    return fired


@torch.no_grad()
def add_tokens(since_fired: Tensor, sums: Tensor, n_tokens: Tensor) -> Tensor:
    """Add a step's `n_tokens` (0-dim) tokens to each latent's number of tokens since it fired [n]; clear `sums`.

    The number is reset to 0 for latents that fired in the step. `sums` [n + m] starts with each latent's firing count;
    its other elements [m] are returned. If there are no tokens, the contents of `sums` are ignored. `n_tokens` must not
    be a view of `sums`.
    """
    if triton := TOKENS_SINCE_FIRED.on(since_fired):
        by_kernel: Tensor = triton.add_tokens(since_fired, sums, n_tokens)
        return by_kernel
    n = len(since_fired)
    sums.masked_fill_(n_tokens == 0, 0)
    since_fired.add_(n_tokens.long()).masked_fill_(sums[:n] > 0, 0)
    others = sums[n:].clone()
    sums.zero_()
    return others


@torch.no_grad()
def take_variance(variance: Tensor, sums: Tensor) -> None:
    """Set a variance (0-dim) to a step's mean squared error, with `sums` = [n_tokens, Σ‖error‖², ...].

    The variance stays above 0, and does not change if the step has no tokens.
    """
    if variance.dtype == torch.float32 and (triton := TOKENS_SINCE_FIRED.on(variance)):
        triton.take_variance(variance, sums)
        return
    n_tokens, error = sums[0], sums[1]
    torch.where(n_tokens > 0, (error / n_tokens).clamp_min(LEAST_VARIANCE), variance, out=variance)
