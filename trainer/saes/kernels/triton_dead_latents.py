"""AuxK's candidates, their weights and their gradients on a GPU: one kernel launch each, where torch needs 3 to 18.

In a 1 ms step, each small launch costs 2.5 µs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.saes.kernels.triton_top_k import BY_HALVES, choose, search

# The maximum number of latents whose counts a program holds in registers, and the number of latents per thread. With 32
# latents per thread and twice as many threads, most GPUs spilled registers.
MOST_LATENTS, PER_THREAD = 2**15, 64
# The number of latents whose positions a program computes, and the number of row columns it copies.
PART, COLUMNS = 1024, 1024
# Silence is capped at this number of tokens, since 32-bit counts take half as many registers as 64-bit counts.
LONGEST_SINCE_FIRED = tl.constexpr(2**31 - 1)


def fits(since_fired: Tensor, dead_after: int) -> bool:
    """Return whether a program can hold the counts of all latents."""
    return 0 < len(since_fired) <= MOST_LATENTS and 0 < dead_after < LONGEST_SINCE_FIRED.value


def longest_since_fired(
    since_fired: Tensor, b_enc: Tensor, variance: Tensor, dead_after: int, n: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `dead_latents.longest_since_fired`."""
    n_latents = len(since_fired)
    latents, bias = since_fired.new_empty(n), b_enc.new_empty(n, dtype=dtype)
    weight = torch.empty_like(variance)
    held: int = triton.next_power_of_2(n_latents)
    warps, part = max(held // (32 * PER_THREAD), 4), min(PART, held)
    # Triton launches kernels on the current device, not necessarily on the tensors' device.
    with torch.cuda.device_of(since_fired):
        _find_longest_since_fired[triton.cdiv(n_latents, part),](
            latents, bias, weight, since_fired, b_enc.detach(), variance, dead_after, n_latents, n,
            HELD=held, TILE=min(256 * warps, held), PART=part, num_warps=warps,
        )  # fmt: skip
    return latents, bias, weight


def rows(reads: Tensor, writes: Tensor, W_enc: Tensor, W_dec: Tensor, latents: Tensor) -> None:
    """Copy rows of n latents from W_enc [d_sae, d_in] and W_dec [d_sae, d_out]; latent index −1 yields zeros."""
    n, n_read, n_written = len(latents), W_enc.shape[1], W_dec.shape[1]
    with torch.cuda.device_of(W_enc):
        grid, columns = _grid(n, n_read, n_written)
        _copy_rows[grid](reads, writes, W_enc, W_dec, latents, n_read, n_written, COLUMNS=columns, num_warps=4)


def add(
    wholes: tuple[Tensor, Tensor, Tensor], latents: Tensor, parts: tuple[Tensor, Tensor, Tensor],
    input_bias: Tensor | None, centred: Tensor | None,
) -> None:  # fmt: skip
    """Implement `dead_latents.add`; the full matrices must be contiguous."""
    whole_enc, whole_bias, whole_dec = wholes
    W_enc, b_enc, W_dec = (one.contiguous() for one in parts)
    n_read, n_written = W_enc.shape[1], W_dec.shape[1]
    with torch.cuda.device_of(whole_enc):
        grid, columns = _grid(len(latents), n_read, n_written)
        _add_rows[grid](
            whole_enc, whole_bias, whole_dec, input_bias, latents, W_enc, b_enc, W_dec, centred, n_read, n_written,
            COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    for one in (*wholes, input_bias):
        if one is not None:
            # Torch's own in-place operations also increment the version.
            torch.autograd.graph.increment_version(one)


def _grid(n: int, *widths: int) -> tuple[tuple[int, int], int]:
    columns = max(16, min(triton.next_power_of_2(max(widths)), COLUMNS))
    return (n, triton.cdiv(max(widths), columns)), columns


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """Run each kernel once with rows of this dtype.

    Triton errors propagate; raise `RuntimeError` if the results are wrong.
    """
    since_fired = torch.arange(1200, device=device) % 100
    b_enc = torch.arange(1200, device=device).float() % 64
    # 24 latents have been silent for at least 98 tokens. `few` contains all 24 latents; `many` contains the 12 latents
    # with 99 tokens and the first 8 latents with 98 tokens.
    few, many = (longest_since_fired(since_fired, b_enc, b_enc[4], 98, n, dtype) for n in (30, 20))
    numbers = torch.arange(1200, device=device)
    expected = (
        numbers[since_fired >= 98],
        torch.cat([numbers[since_fired == 98][:8], numbers[since_fired == 99]]).sort().values,
    )
    are_right = (few[0][few[1] > -torch.inf] == expected[0]).all() & (many[0] == expected[1]).all()
    are_right &= (many[1] == b_enc[expected[1]]).all() & (few[2] == 0.25)
    are_right &= longest_since_fired(since_fired, b_enc, b_enc[4], 100, 3, dtype)[2] == 0
    W_enc, W_dec = b_enc[:90].view(6, 15), b_enc[:192].view(6, 32)
    latents = torch.tensor([4, 1], device=device)
    reads, writes = (one.new_empty(2, one.shape[1], dtype=dtype) for one in (W_enc, W_dec))
    rows(reads, writes, W_enc, W_dec, latents)
    are_right &= (reads == W_enc[latents]).all() & (writes == W_dec[latents]).all()
    wholes, bias = (W_enc.clone(), b_enc[:6].clone(), W_dec.clone()), torch.zeros(15, device=device)
    add(wholes, latents, (reads, few[1][:0].new_ones(2), writes), bias, reads[0])
    twice = torch.ones(6, 1, device=device).index_fill(0, latents, 2)
    are_right &= (wholes[0] == twice * W_enc).all() & (wholes[2] == twice * W_dec).all() & (bias == -W_enc[4]).all()
    if not are_right or wholes[1].tolist() != [0, 2, 2, 3, 5, 5]:
        raise RuntimeError("the kernels give wrong results")


@triton.jit
def _find_longest_since_fired(
    out_latents, out_bias, out_weight, since_fired, b_enc, variance, dead_after, n_latents, n,
    HELD: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Find the candidates in one block of latents, and write each candidate at its position among all candidates.

    Each program reads the counts of all latents, so that programs do not wait for one another. All programs run in
    parallel, so they take as long as a single program.
    """
    first = tl.program_id(0) * PART
    dead, dead_before = tl.zeros([TILE], dtype=tl.int32), tl.zeros([TILE], dtype=tl.int32)
    for begin in range(0, n_latents, TILE):
        latents = begin + tl.arange(0, TILE)
        is_dead = tl.load(since_fired + latents, mask=latents < n_latents, other=-1) >= dead_after
        dead += is_dead.to(tl.int32)
        dead_before += (is_dead & (latents < first)).to(tl.int32)
    n_dead, n_above_before = tl.sum(dead, axis=0), tl.sum(dead_before, axis=0)
    # If at most n latents are dead, the first live ones, which all compare equal, fill the remaining positions.
    bound, n_above, n_equal_before = -1, n_dead, first - n_above_before
    if n_dead > n:
        silent_for = _since_fired_of_dead(since_fired, tl.arange(0, HELD), n_latents, dead_after)
        bound, n_above = search(silent_for, n, 0, tl.max(silent_for, axis=0), BY_HALVES, 32)
        above, equal = tl.zeros([TILE], dtype=tl.int32), tl.zeros([TILE], dtype=tl.int32)
        for begin in range(0, first, TILE):
            # Read the counts again, since keeping all counts and these sums took more registers than sm_120 has.
            earlier = _since_fired_of_dead(since_fired, begin + tl.arange(0, TILE), first, dead_after)
            above += (earlier > bound).to(tl.int32)
            equal += (earlier == bound).to(tl.int32)
        n_above_before, n_equal_before = tl.sum(above, axis=0), tl.sum(equal, axis=0)
    n_equal = n - n_above
    own = first + tl.arange(0, PART)
    of_own = _since_fired_of_dead(since_fired, own, n_latents, dead_after)
    chosen, nth = choose(of_own, tl.maximum(n_equal - n_equal_before, 0), bound, 0)
    indices = n_above_before + tl.minimum(n_equal_before, n_equal) + nth - 1
    tl.store(out_latents + indices, own.to(tl.int64), mask=chosen)
    bias = tl.load(b_enc + own, mask=chosen & (of_own >= 0), other=-float("inf"))
    tl.store(out_bias + indices, bias.to(out_bias.dtype.element_ty), mask=chosen)
    if first == 0:
        tl.store(out_weight, tl.where(n_dead > 0, 1 / tl.load(variance), 0))


@triton.jit
def _since_fired_of_dead(since_fired, latents, n_latents, dead_after):
    """Return the number of tokens since each latent in a block last fired, int32; -1 for live latents and padding."""
    words, inside = since_fired.to(tl.pointer_type(tl.int32)) + 2 * latents, latents < n_latents
    low, high = tl.load(words, mask=inside, other=0), tl.load(words + 1, mask=inside, other=0)
    silent_for = tl.where((high > 0) | (low < 0), LONGEST_SINCE_FIRED, low)
    # Padding has a count of 0, and `dead_after` is at least 1.
    return tl.where(silent_for >= dead_after, silent_for, -1)


@triton.jit
def _copy_rows(out_reads, out_writes, W_enc, W_dec, some_rows, n_read, n_written, COLUMNS: tl.constexpr):
    """Copy one block of columns of a latent's rows; latent index -1 yields zeros."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    latent = tl.load(some_rows + row)
    is_here = latent >= 0
    read = tl.load(W_enc + latent * n_read + columns, mask=is_here & (columns < n_read), other=0)
    written = tl.load(W_dec + latent * n_written + columns, mask=is_here & (columns < n_written), other=0)
    tl.store(out_reads + row * n_read + columns, read.to(out_reads.dtype.element_ty), mask=columns < n_read)
    tl.store(out_writes + row * n_written + columns, written.to(out_writes.dtype.element_ty), mask=columns < n_written)


@triton.jit
def _add_rows(
    inout_W_enc, inout_b_enc, inout_W_dec, inout_input_bias, some_rows, W_enc, b_enc, W_dec, centred, n_read, n_written,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add one block of columns of a latent's gradients; skip latent index -1.

    Programs for the first block of columns also add the bias gradient. Programs for the first latent also update the
    input bias gradient.
    """
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    latent = tl.load(some_rows + row)
    is_here = latent >= 0
    _add(inout_W_enc + latent * n_read + columns, W_enc + row * n_read + columns, is_here & (columns < n_read))
    _add(inout_W_dec + latent * n_written + columns, W_dec + row * n_written + columns, is_here & (columns < n_written))
    if (tl.program_id(1) == 0) & is_here:
        tl.store(inout_b_enc + latent, tl.load(inout_b_enc + latent) + tl.load(b_enc + row).to(tl.float32))
    if centred is not None:
        # If both conditions were joined by "and", Triton 3.2 would compile this block even if `centred` is None.
        indices, inside = inout_input_bias + columns, (columns < n_read) & (row == 0)
        taken = tl.load(centred + columns, mask=inside, other=0).to(tl.float32)
        tl.store(indices, tl.load(indices, mask=inside, other=0) - taken, mask=inside)


@triton.jit
def _add(indices, added, inside):
    here = tl.load(indices, mask=inside, other=0)
    tl.store(indices, here + tl.load(added, mask=inside, other=0).to(tl.float32), mask=inside)
