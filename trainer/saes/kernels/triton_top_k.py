"""The largest of each row on a GPU, a row per program: which they are is decided by bits, so that it is always exact.

A row is read once, in groups of neighbouring columns. The k groups with the largest maxima hold its k largest, and only
they are read again. What an exact bound is follows bit by bit from counts; of equal numbers the lowest columns are
taken. Results are in the order of columns, and nothing depends on the order of programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Groups of a row whose maxima a program holds, numbers of the chosen groups, and those that it reads at a time. With
# 8,192 groups a thread has 128 registers instead of 80, and a processor two programs instead of three.
MOST_GROUPS, MOST_KEPT, TILE = 2**12, 2**12, 2**13
# Columns of the smallest group: 16 bytes of bf16, what a thread reads at once.
LEAST_GROUP = 8
# The widest row that a program holds as a whole.
WIDEST = 2**14
# Fewer rows would leave most of a GPU idle.
LEAST_ROWS = 64
# Of the types whose bits are ordered: infinity, and how many bits there are.
_INFINITY = {torch.bfloat16: (0x7F80, 16), torch.float16: (0x7C00, 16), torch.float32: (0x7F800000, 32)}


def fits(values: Tensor, k: int) -> bool:
    """Tell whether `largest_of_each` can find the k largest of each row, and fills a GPU."""
    n_rows, n = values.shape
    kept = triton.next_power_of_2(max(k, 1)) * _group(n)
    return values.dtype in _INFINITY and n_rows >= LEAST_ROWS and 0 < k <= n and kept <= MOST_KEPT


def largest_of_each(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the columns of the k largest of each row, ascending, and their values: both [n_rows, k]."""
    n_rows, n = values.shape
    bits, group = _bits(values), _group(n)
    n_groups = triton.cdiv(n, group)
    columns = torch.empty(n_rows, k, dtype=torch.int64, device=values.device)
    largest = values.new_empty(n_rows, k)
    maxima = bits.new_empty(n_rows, n_groups)
    if n_rows:
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device_of(values):
            _largest_of_rows[n_rows,](
                columns,
                _bits(largest),
                maxima,
                bits,
                n,
                n_groups,
                k,
                GROUP=group,
                GROUPS=triton.next_power_of_2(n_groups),
                AT_ONCE=min(TILE // group, triton.next_power_of_2(n_groups)),
                KEPT=triton.next_power_of_2(k),
                **_of_type(values),
                num_warps=8,
            )
    return columns, largest


def fits_whole(values: Tensor, k: int) -> bool:
    """Tell whether `strongest` can hold each row as a whole."""
    n_rows, n = values.shape
    return values.dtype in _INFINITY and n_rows >= LEAST_ROWS and 0 < k <= n <= WIDEST


def strongest(values: Tensor, k: int) -> Tensor:
    """Return the k largest of each row where they are positive or NaN, in place of all others 0: [n_rows, n]."""
    n_rows, n = values.shape
    kept = torch.empty_like(values, memory_format=torch.contiguous_format)
    columns = triton.next_power_of_2(n)
    warps = min(max(columns // 512, 1), 16)
    if n_rows:
        with torch.cuda.device_of(values):
            _keep_strongest[n_rows,](
                _bits(kept), _bits(values), n, k, COLUMNS=columns, **_of_type(values), num_warps=warps
            )
    return kept


def try_out(device: torch.device) -> None:
    """Run every kernel once; raise what Triton raises where it cannot, and `RuntimeError` where results are wrong."""
    values = (torch.arange(64, device=device) * 37 % 64).bfloat16().expand(2, 64).contiguous()
    columns, largest = largest_of_each(values, 3)
    kept = strongest(values, 3)
    is_right = (largest.sum(dim=1) == 186) & (kept.gather(1, columns) == largest).all(dim=1) & (kept.sum(dim=1) == 186)
    if not is_right.all():
        raise RuntimeError("the kernels give wrong results")


def _group(n: int) -> int:
    group = LEAST_GROUP
    while triton.cdiv(n, group) > MOST_GROUPS:
        group *= 2
    return group


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def _of_type(values: Tensor) -> dict[str, Any]:
    infinity, bits = _INFINITY[values.dtype]
    return {"INFINITY": infinity, "BITS": bits}


@triton.jit
def _largest_of_rows(
    out_columns, out_values, inout_maxima, bits, n_columns, n_groups, k,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, AT_ONCE: tl.constexpr, KEPT: tl.constexpr,
    INFINITY: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Find the k largest of one row; `inout_maxima` is for the program itself."""
    row = tl.program_id(0).to(tl.int64)
    bits += row * n_columns
    inout_maxima += row * n_groups
    out_columns += row * k
    out_values += row * k
    lowest = 1 - 2 ** (BITS - 1)
    for first in range(0, n_groups, AT_ONCE):
        groups = first + tl.arange(0, AT_ONCE)
        columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = columns < n_columns
        ordered = _ordered(tl.load(bits + columns, mask=inside, other=0), INFINITY, BITS)
        maxima = tl.max(tl.where(inside, ordered.to(tl.int32), lowest), axis=1)
        tl.store(inout_maxima + groups, maxima, mask=groups < n_groups)
    # Until all threads have stored what others read.
    tl.debug_barrier()

    groups = tl.arange(0, GROUPS)
    ranks = _ranks(tl.load(inout_maxima + groups, mask=groups < n_groups, other=0), BITS)
    chosen = _are_largest(tl.where(groups < n_groups, ranks, -1), k, BITS)
    tl.store(out_columns + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, groups, mask=chosen)
    tl.debug_barrier()

    kept = tl.arange(0, KEPT)
    is_kept = kept < tl.minimum(k, n_groups)
    groups = tl.load(out_columns + kept, mask=is_kept, other=0).to(tl.int32)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = is_kept[:, None] & (columns < n_columns)
    numbers = tl.load(bits + columns, mask=inside, other=0)
    ranks = tl.where(inside, _ranks(_ordered(numbers, INFINITY, BITS), BITS), -1)
    chosen = _are_largest(tl.reshape(ranks, [KEPT * GROUP]), k, BITS)
    places = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    # Until all have read which groups were chosen.
    tl.debug_barrier()
    tl.store(out_columns + places, tl.reshape(columns, [KEPT * GROUP]), mask=chosen)
    tl.store(out_values + places, tl.reshape(numbers, [KEPT * GROUP]), mask=chosen)


@triton.jit
def _keep_strongest(
    out_bits, bits, n_columns, k, COLUMNS: tl.constexpr, INFINITY: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Copy the k largest of one row that are above 0, and 0 in place of the others."""
    start, columns = tl.program_id(0).to(tl.int64) * n_columns, tl.arange(0, COLUMNS)
    inside = columns < n_columns
    numbers = tl.load(bits + start + columns, mask=inside, other=0)
    ordered = _ordered(numbers, INFINITY, BITS)
    chosen = _are_largest(tl.where(inside, _ranks(ordered, BITS), -1), k, BITS)
    # What is ordered above 0 is positive, or no number.
    tl.store(out_bits + start + columns, tl.where(chosen & (ordered > 0), numbers, 0), mask=inside)


@triton.jit
def _ordered(bits, INFINITY: tl.constexpr, BITS: tl.constexpr):
    """Return integers in the order of the floating-point numbers of these bits; NaN is above all."""
    largest = 2 ** (BITS - 1) - 1
    size = bits & largest
    ordered = tl.where(bits < 0, bits ^ largest, bits)
    return tl.where(size > INFINITY, size | largest, ordered)


@triton.jit
def _ranks(ordered, BITS: tl.constexpr):
    """Return the same from 0 on, in a type that also has numbers below."""
    wide: tl.constexpr = tl.int64 if BITS == 32 else tl.int32
    return ordered.to(wide) + 2 ** (BITS - 1)


@triton.jit
def _are_largest(ranks, k, BITS: tl.constexpr):
    """Tell which of ranks [n] are the k largest, of equal ones the first; ranks below 0 never are."""
    # The largest bound that k of them reach.
    bound = tl.full((), 0, ranks.dtype)
    for place in range(BITS):
        higher = bound | (tl.full((), 1, ranks.dtype) << (BITS - 1 - place))
        bound = tl.where(tl.sum((ranks >= higher).to(tl.int32), axis=0) >= k, higher, bound)
    above, equal = ranks > bound, ranks == bound
    n_above = tl.sum(above.to(tl.int32), axis=0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= k - n_above))
