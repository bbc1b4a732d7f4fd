"""Which pre-activations go on.

On a GPU all shapes are known beforehand, so that the host never waits. On a CPU asking is free, and most of the work
is spared by looking only at what can be among the largest; the result is the same.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from trainer.saes.acts import Places

# Rows in the sample that a bound is guessed from, and how many times as many as are wanted should lie above it: a
# batch's share above a bound differs from that of 64 of its rows by less than a sixth.
SAMPLE_ROWS, MARGIN = 64, 1.5
# Columns taken together below this save nothing: 50 ms on one core instead of 37 for 3,072 columns in groups of 8.
LEAST_GROUP = 4


def k_per_token(pre_acts: Tensor, k: int) -> Places:
    """The k largest of each token."""
    latents = largest(pre_acts, k).flatten()
    tokens = torch.arange(len(pre_acts), device=latents.device)
    return Places(latents, tokens.repeat_interleave(k), tokens * k)


def k_per_batch(pre_acts: Tensor, k: float) -> Places:
    """The k · n_tokens largest of all tokens together, ordered by token and latent; few or none for some tokens."""
    return places_of(largest_of_all(pre_acts, min(round(k * len(pre_acts)), pre_acts.numel())), pre_acts)


def largest(pre_acts: Tensor, k: int) -> Tensor:
    """The columns of the k largest of each token [n_tokens, k], in no order."""
    return (_largest if pre_acts.is_cuda else _largest_by_groups)(pre_acts, k)


def largest_of_all(pre_acts: Tensor, n: int) -> Tensor:
    """The n largest of all, as ascending numbers in the flattened [n_tokens, d_sae]."""
    if pre_acts.is_cuda:
        return _largest(pre_acts.flatten(), n).sort().values
    candidates = _not_below(pre_acts, _guessed_bound(pre_acts, n))
    if len(candidates) < n:
        candidates = torch.arange(pre_acts.numel())
    is_chosen = torch.zeros(len(candidates), dtype=torch.bool)
    is_chosen[_largest(pre_acts.flatten().index_select(0, candidates), n)] = True
    return candidates[is_chosen]


def above(pre_acts: Tensor, bound: Tensor | float, *, may_wait: bool = False) -> Places | None:
    """As `where`: those above a bound (a number, 0-dim or [d_sae]), or NaN, which must not pass for inactive.

    How many there are is unknown to the host of a GPU, which `may_wait` for it only outside training; else it is
    always the dense product there.
    """
    if pre_acts.is_cuda and not may_wait:
        return None
    # Beside a bf16 matrix torch would round the bound to bf16 before it compares.
    exact = pre_acts.to(bound.dtype) if isinstance(bound, Tensor) else pre_acts
    return where(~(exact <= bound))


def where(mask: Tensor) -> Places | None:
    """The marked ones of a bool [n_tokens, d_sae], or None where a dense product is faster.

    Sparse entries cost a product about 16 times as much as dense ones on a CPU.
    """
    # numpy counts and finds them in a third of torch's time.
    n_marked = int(mask.count_nonzero()) if mask.is_cuda else np.count_nonzero(mask.numpy())
    if n_marked * 16 > mask.numel():
        return None
    flat = mask.flatten().nonzero().flatten() if mask.is_cuda else torch.from_numpy(np.flatnonzero(mask.numpy()))
    return places_of(flat, mask)


def places_of(flat: Tensor, pre_acts: Tensor) -> Places:
    """Places from ascending numbers in the flattened [n_tokens, d_sae]."""
    n_tokens, d_sae = pre_acts.shape
    tokens = flat // d_sae
    starts = torch.searchsorted(tokens, torch.arange(n_tokens, device=flat.device))
    return Places(flat - tokens * d_sae, tokens, starts)


def _largest(values: Tensor, k: int) -> Tensor:
    """Where the k largest along the last dimension are; a NaN counts as larger than all."""
    return values.topk(k, dim=-1, sorted=False).indices


def _group_size(d_sae: int, k: int) -> int:
    """The divisor of d_sae that makes d_sae / size group maxima and k · size columns fewest together."""
    return next(size for size in range(math.isqrt(d_sae // k), -1, -1) if size <= 1 or d_sae % size == 0)


def _largest_by_groups(pre_acts: Tensor, k: int) -> Tensor:
    """The same as `_largest` [n_tokens, k] for each token, but only among the k groups with the largest maxima.

    A column of another group is at most its group's maximum, and k maxima are at least as large. A group takes
    every (d_sae / size)th column, which lets the maxima be taken in vectors. Maxima and columns are sought through in
    the same way: 40 ms on one core for 2,048 tokens and 16,384 latents, 49 without this, and 78 without groups.
    """
    n_tokens, d_sae = pre_acts.shape
    if (size := _group_size(d_sae, k)) < LEAST_GROUP:
        return _largest(pre_acts, k)
    n_groups = d_sae // size
    groups = _largest_by_groups(pre_acts.view(n_tokens, size, n_groups).amax(dim=1), k)
    columns = groups[:, None] + torch.arange(0, d_sae, n_groups)[:, None]
    columns = columns.view(n_tokens, size * k)
    return columns.gather(1, _largest_by_groups(pre_acts.gather(1, columns), k))


def _guessed_bound(pre_acts: Tensor, n: int) -> float:
    """A value that probably more than n, but not many more, lie above."""
    sample = pre_acts[:: max(1, len(pre_acts) // SAMPLE_ROWS)].flatten()
    rank = min(math.ceil(MARGIN * n * len(sample) / max(pre_acts.numel(), 1)), len(sample))
    return float(sample.topk(rank, sorted=False).values.min()) if rank else math.inf


def _not_below(pre_acts: Tensor, bound: float) -> Tensor:
    """Where the flattened values are above the bound or NaN, ascending.

    numpy takes 12 ms of one core for 12.6 million values where torch takes 37.
    """
    # numpy has no bf16.
    values = pre_acts if pre_acts.dtype in (torch.float32, torch.float64) else pre_acts.float()
    return torch.from_numpy(np.flatnonzero(~(values.numpy() <= bound)))
