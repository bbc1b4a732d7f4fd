"""The `since_fired` functions as one kernel each; torch needs 4 to 6 operations, each of which takes as long."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.saes.kernels.since_fired import LEAST_VARIANCE
from trainer.saes.sparse_acts import SparseActs, SparseIndices

# The number of latents per program, and the maximum number of other sums, which the first program handles alone. Every
# SAE has fewer.
_PART, _MOST_OTHERS = 1024, 16


def count(sums: Tensor, acts: SparseActs, n_tokens: int, numbers: tuple[Tensor, ...]) -> Tensor:
    """Add a pass's counts to `sums`, as `since_fired.count` does.

    The counts are integers, so their sums are exact in any order.
    """
    fired, n_entries = sums.new_zeros(acts.d_sae), len(acts.values)
    # A single scalar needs no copy.
    others = numbers[0].reshape(1) if len(numbers) == 1 else torch.stack(numbers)
    assert len(others) <= _MOST_OTHERS, "the first program cannot add more sums"
    with torch.cuda.device_of(sums):
        _count[max(1, triton.cdiv(n_entries, _PART)),](
            fired, sums, acts.values, acts.indices.latents, others, float(n_tokens), n_entries, acts.d_sae, len(others),
            PART=_PART, OTHERS=_MOST_OTHERS, num_warps=4,
        )  # fmt: skip
    return fired


def add_tokens(since_fired: Tensor, sums: Tensor, n_tokens: Tensor) -> Tensor:
    """Update the counts and clear the sums, as `since_fired.add_tokens` does."""
    n = len(since_fired)
    others = torch.empty_like(sums[n:])
    assert len(others) <= _MOST_OTHERS, "the first program cannot return more sums"
    # Triton launches kernels on the current device, not necessarily on the tensors' device.
    with torch.cuda.device_of(since_fired):
        _add_tokens[max(1, triton.cdiv(n, _PART)),](
            since_fired, sums, others, n_tokens, n, len(others), PART=_PART, OTHERS=_MOST_OTHERS, num_warps=4
        )
    return others


def take_variance(variance: Tensor, sums: Tensor) -> None:
    """Set the variance, as `since_fired.take_variance` does."""
    with torch.cuda.device_of(variance):
        _take_variance[1,](variance, sums, LEAST=LEAST_VARIANCE, num_warps=1)


def try_out(device: torch.device) -> None:
    """Run each kernel once, letting Triton errors propagate; raise `RuntimeError` if the results are wrong."""
    since_fired, sums = torch.tensor([5, 7], device=device), torch.tensor([0.0, 2.0, 3.0, 4.0], device=device)
    others = add_tokens(since_fired, sums, sums[2].clone())
    are_right = (since_fired.tolist(), others.tolist(), sums.tolist()) == ([8, 0], [3, 4], [0, 0, 0, 0])
    latents, variance = torch.tensor([1, 1, 0], device=device), torch.ones((), device=device)
    fired = count(sums, SparseActs(latents.float(), SparseIndices(latents, None, latents[2:]), 2), 5, (others[1],))
    take_variance(variance, others + 1)
    if not are_right or variance != 1.25 or (fired.tolist(), sums.tolist()) != ([0, 2], [0, 2, 5, 4]):
        raise RuntimeError("the kernels give wrong results")


@triton.jit
def _count(
    inout_fired, inout_sums, values, latents, others, n_tokens, n_entries, n, n_others,
    PART: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Add a block of active entries to their latents' counts; program 0 also adds the scalars to the other sums."""
    part = tl.program_id(0)
    at = part * PART + tl.arange(0, PART)
    fires = tl.load(values + at, mask=at < n_entries, other=0) > 0
    latent = tl.load(latents + at, mask=fires, other=0)
    one = tl.full([PART], 1.0, tl.float32)
    tl.atomic_add(inout_fired + latent, one, mask=fires, sem="relaxed")
    tl.atomic_add(inout_sums + latent, one, mask=fires, sem="relaxed")
    if part == 0:
        tl.store(inout_sums + n, tl.load(inout_sums + n) + n_tokens)
        other = tl.arange(0, OTHERS)
        place, is_one = inout_sums + n + 1 + other, other < n_others
        added = tl.load(others + other, mask=is_one, other=0)
        tl.store(place, tl.load(place, mask=is_one, other=0) + added, mask=is_one)


@triton.jit
def _add_tokens(
    inout_since_fired, inout_sums, out_others, n_tokens, n, n_others, PART: tl.constexpr, OTHERS: tl.constexpr
):
    """Update the counts of one block of latents and clear their sums; program 0 also returns the other sums."""
    part, came = tl.program_id(0), tl.load(n_tokens)
    at = part * PART + tl.arange(0, PART)
    inside = at < n
    fired = tl.where(came > 0, tl.load(inout_sums + at, mask=inside, other=0), 0.0)
    since_fired = tl.load(inout_since_fired + at, mask=inside, other=0) + came.to(tl.int64)
    tl.store(inout_since_fired + at, tl.where(fired > 0, 0, since_fired), mask=inside)
    tl.store(inout_sums + at, tl.zeros_like(fired), mask=inside)
    if part == 0:
        other = tl.arange(0, OTHERS)
        is_one = other < n_others
        value = tl.load(inout_sums + n + other, mask=is_one, other=0)
        tl.store(out_others + other, tl.where(came > 0, value, 0.0), mask=is_one)
        tl.store(inout_sums + n + other, tl.zeros_like(value), mask=is_one)


@triton.jit
def _take_variance(inout_variance, sums, LEAST: tl.constexpr):
    """Set the variance to the mean squared error."""
    n_tokens = tl.load(sums)
    # Round as torch does, and keep NaN.
    mean = tl.div_rn(tl.load(sums + 1), n_tokens)
    tl.store(inout_variance, tl.where(mean < LEAST, LEAST, mean), mask=n_tokens > 0)
