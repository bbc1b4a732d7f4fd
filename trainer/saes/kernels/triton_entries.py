"""Moves chosen entries to the front on a GPU in a single launch; torch needs eight launches."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# The number of entries per program.
_TILE, _WARPS = 1024, 4


class Ordered(NamedTuple):
    """Activation entries [n]: the first `n_chosen` (0-dim) entries are chosen; the other entries have a value of 0.

    `ascending` contains the tokens of the chosen entries, and n_tokens for the other entries.
    """

    latents: Tensor
    tokens: Tensor
    values: Tensor
    ascending: Tensor
    n_chosen: Tensor


def chosen_first(latents: Tensor, tokens: Tensor, values: Tensor, is_chosen: Tensor, n_tokens: int) -> Ordered:
    """Move the chosen entries to the front.

    Both the chosen entries and the other entries keep their relative order. All inputs are [n].
    """
    so_far, n = is_chosen.cumsum(0), len(is_chosen)
    given = [one.contiguous() for one in (latents, tokens, values)]
    out_latents, out_tokens, out_values, ascending = (torch.empty_like(one) for one in (*given, given[1]))
    # Triton launches kernels on the current device, not necessarily on the tensors' device.
    with torch.cuda.device_of(values):
        _put_chosen_first[triton.cdiv(n, _TILE),](
            out_latents, out_tokens, out_values, ascending, *given, is_chosen, so_far, n, n_tokens,
            TILE=_TILE, num_warps=_WARPS,
        )  # fmt: skip
    return Ordered(out_latents, out_tokens, out_values, ascending, so_far[-1])


def try_out(device: torch.device) -> None:
    """Run the kernel once, letting Triton errors propagate; raise `RuntimeError` if the results are wrong."""
    numbers = torch.arange(3000, device=device)
    is_chosen = numbers % 3 == 0
    found = chosen_first(numbers, numbers // 10, numbers + 1.0, is_chosen, 300)
    expected = torch.cat([numbers[::3], numbers[~is_chosen]])
    are_right = (found.latents == expected).all() & (found.tokens == expected // 10).all() & (found.n_chosen == 1000)
    are_right &= (found.values == torch.where(numbers < 1000, expected + 1, 0)).all()
    are_right &= (found.ascending == torch.where(numbers < 1000, expected // 10, 300)).all()
    if not are_right:
        raise RuntimeError("the kernel gives wrong results")


@triton.jit
def _put_chosen_first(
    out_latents, out_tokens, out_values, out_ascending, latents, tokens, values, is_chosen, chosen_so_far, n, n_tokens,
    TILE: tl.constexpr,
):  # fmt: skip
    """Move one block of entries to their new positions; `chosen_so_far` is the inclusive count of chosen entries."""
    indices = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = indices < n
    chosen = tl.load(is_chosen + indices, mask=inside, other=0) != 0
    so_far = tl.load(chosen_so_far + indices, mask=inside, other=0)
    ordered = tl.where(chosen, so_far - 1, tl.load(chosen_so_far + n - 1) + indices - so_far)
    token = tl.load(tokens + indices, mask=inside, other=0)
    value = tl.load(values + indices, mask=inside, other=0)
    tl.store(out_latents + ordered, tl.load(latents + indices, mask=inside, other=0), mask=inside)
    tl.store(out_tokens + ordered, token, mask=inside)
    tl.store(out_values + ordered, tl.where(chosen, value, 0), mask=inside)
    tl.store(out_ascending + ordered, tl.where(chosen, token, n_tokens), mask=inside)
