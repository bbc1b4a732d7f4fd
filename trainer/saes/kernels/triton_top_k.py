"""On a GPU, finds the largest values in each row or in a whole matrix by comparing their bits, so the result is exact.

A matrix is read once, in groups of adjacent columns. The k groups with the largest maxima contain the k largest values,
and only these groups are read again. The exact bound is found by counting. If each program processes one row, a search
narrows an interval until exactly k values exceed the bound or no other bound is left. If many programs share an entire
matrix, they count two digits of 8 bits each. Ties go to the lowest index. Results are ordered by column, and nothing
depends on the order of programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.contract.planning.activation_memory import GROUP

# The maximum number of group maxima, and of values in chosen groups, that a program holds for a row, and the number of
# bytes it reads at a time. Reading twice as many bytes saves no instructions and takes up to a third more registers.
MOST_GROUPS, MOST_KEPT, TILE_BYTES = 2**12, 2**12, 2**14
# The number of columns in the smallest group: 16 bytes of bf16, read by a thread in one load.
LEAST_GROUP = 8
# The widest row that a program can hold completely.
WIDEST = 2**14
# The widest row whose largest columns are gathered: with more values per thread, registers were spilled.
WIDEST_GATHERED = 2**13
# The minimum number of rows, since fewer rows would leave most of a GPU idle.
LEAST_ROWS = 64
# If programs share a search: the number of values per program, and the number of programs whose counts are summed at a
# time.
SHARED_TILE, COUNTS = 2**13, 2**10
# The number of tiles whose digits one program processes.
TILES = 8
# The smallest supported ratio of all values to requested values; below this ratio, groups save little.
LEAST_SHARE = 64
# For each dtype: the bit pattern of infinity, and the width in bits.
_INFINITY = {torch.bfloat16: (0x7F80, 16), torch.float16: (0x7C00, 16), torch.float32: (0x7F800000, 32)}
# A step so large that `search` bisects from the start.
BY_HALVES = tl.constexpr(2**30)


def fits(values: Tensor, k: int) -> bool:
    """Return whether `largest_of_each` supports these rows and k, and whether there are enough rows to fill a GPU."""
    n_rows, n = values.shape
    are_few = _keeps_few(n, k) or n <= WIDEST_GATHERED
    return values.dtype in _INFINITY and n_rows >= LEAST_ROWS and 0 < k <= n and are_few


def _keeps_few(n: int, k: int) -> bool:
    """Return whether a program can hold the k groups with the largest maxima in a row of n columns."""
    kept: int = triton.next_power_of_2(max(k, 1)) * _group(n, k)
    return kept <= MOST_KEPT


def largest_of_each(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ascending columns and the values of each row's k largest elements, both [n_rows, k]."""
    n_rows, n = values.shape
    columns = torch.empty(n_rows, k, dtype=torch.int64, device=values.device)
    largest = values.new_empty(n_rows, k)
    if n_rows:
        # Triton launches kernels on the current device, not necessarily on the tensors' device.
        with torch.cuda.device_of(values):
            (_look_in_groups if _keeps_few(n, k) else _look_at_whole)(
                columns, _bits(largest), _bits(values), k, _of_type(values)
            )
    return columns, largest


def _look_in_groups(out_columns: Tensor, out_bits: Tensor, bits: Tensor, k: int, of_type: dict[str, Any]) -> None:
    n_rows, n = bits.shape
    group = _group(n, k)
    n_groups = triton.cdiv(n, group)
    maxima = bits.new_empty(n_rows, n_groups)
    _largest_of_rows[n_rows,](
        out_columns,
        out_bits,
        maxima,
        bits,
        n,
        n_groups,
        k,
        GROUP=group,
        GROUPS=triton.next_power_of_2(n_groups),
        AT_ONCE=min(TILE_BYTES // (group * bits.dtype.itemsize), triton.next_power_of_2(n_groups)),
        KEPT=triton.next_power_of_2(k),
        **of_type,
        num_warps=4,
    )


def _look_at_whole(out_columns: Tensor, out_bits: Tensor, bits: Tensor, k: int, of_type: dict[str, Any]) -> None:
    n_rows, n = bits.shape
    columns: int = triton.next_power_of_2(n)
    # With 32 values per thread, as in other kernels, registers were spilled.
    warps = min(max(columns // 512, 1), 16)
    _gather_largest[n_rows,](out_columns, out_bits, bits, n, k, COLUMNS=columns, **of_type, num_warps=warps)


def fits_whole(values: Tensor, k: int) -> bool:
    """Return whether a program can hold a complete row, as `strongest` and `are_largest` require."""
    n_rows, n = values.shape
    return values.dtype in _INFINITY and n_rows >= LEAST_ROWS and 0 < k <= n <= WIDEST


def strongest(values: Tensor, k: int) -> Tensor:
    """Keep the k largest values of each row [n_rows, n] that are positive or NaN; replace all others by 0."""
    n_rows, n = values.shape
    kept = torch.empty_like(values, memory_format=torch.contiguous_format)
    columns, warps = _program_of_row(n)
    if n_rows:
        with torch.cuda.device_of(values):
            _keep_strongest[n_rows,](
                _bits(kept), _bits(values), n, k, COLUMNS=columns, **_of_type(values), num_warps=warps
            )
    return kept


def are_largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return a mask [n_rows, n] of the k largest values of each row, and the k-th largest values [n_rows].

    A program holds a complete row; check `fits_whole` first.
    """
    n_rows, n = values.shape
    is_chosen = torch.empty(n_rows, n, dtype=torch.bool, device=values.device)
    smallest = values.new_empty(n_rows)
    columns, warps = _program_of_row(n)
    if n_rows:
        with torch.cuda.device_of(values):
            _mark_largest[n_rows,](
                is_chosen, _bits(smallest), _bits(values), n, k, COLUMNS=columns, **_of_type(values), num_warps=warps
            )
    return is_chosen, smallest


def _program_of_row(n: int) -> tuple[int, int]:
    """Return the number of columns and warps for a program that holds a complete row of n values."""
    columns: int = triton.next_power_of_2(n)
    return columns, min(max(columns // 1024, 1), 16)


def fits_all(values: Tensor, n: int) -> bool:
    """Return whether `largest_of_all` supports these values and n."""
    is_narrow = values.dtype in _INFINITY and values.dtype.itemsize == 2
    few = 0 < n * LEAST_SHARE <= values.numel() < 2**31
    return is_narrow and few and values.is_contiguous() and _shared_group(values.numel(), n) >= LEAST_GROUP


def largest_of_all(values: Tensor, n: int) -> Tensor:
    """Return the indices of the n largest values in the flattened matrix, ascending."""
    grouped = values.view(-1, _shared_group(values.numel(), n))
    groups = _largest(_maxima(grouped), n)
    return _largest(_copied(grouped, groups), n, groups)


def _maxima(grouped: Tensor) -> Tensor:
    """Return the maximum of each group, or NaN if it contains NaN; for groups of 32, torch takes 17 times as long."""
    n_groups, group = grouped.shape
    maxima = grouped.new_empty(n_groups)
    at_once = SHARED_TILE // group
    with torch.cuda.device_of(grouped):
        _write_maxima[triton.cdiv(n_groups, at_once),](
            _bits(maxima), _bits(grouped), n_groups, GROUP=group, AT_ONCE=at_once, **_of_type(grouped), num_warps=8
        )
    return maxima


def _shared_group(n_values: int, n: int) -> int:
    """Return the group size: the power-of-two divisor of `n_values` that minimises the number of values to search.

    The maxima of all groups and the values of n groups are searched.
    """
    return math.gcd(n_values, 2 ** round(math.log2(n_values / n) / 2))


def _largest(values: Tensor, n: int, groups: Tensor | None = None) -> Tensor:
    """Return the ascending indices of the n largest values.

    If `groups` is given, the values [n, size] were gathered from these groups. The returned indices refer to the
    original matrix.
    """
    bits = _bits(values.flatten())
    n_values, n_tiles = len(bits), triton.cdiv(len(bits), SHARED_TILE)
    # Triton launches kernels on the current device, not necessarily on the tensors' device.
    with torch.cuda.device_of(values):

        def launch(kernel: Any, *tensors: Tensor | None, **sizes: int) -> None:
            kernel[n_tiles,](*tensors, n_values, n, **sizes, TILE=SHARED_TILE, **_of_type(values), num_warps=8)

        def count(high_digits: Tensor | None = None) -> tuple[Tensor, Tensor]:
            of_tiles = bits.new_empty(n_tiles, 256, dtype=torch.int32)
            launch(_count_digits, of_tiles, bits, high_digits)
            return of_tiles, of_tiles.sum(dim=0, dtype=torch.int32)

        high_of_tiles, high_digits = count()
        low_of_tiles, low_digits = count(high_digits)
        digits = high_digits, low_digits
        counts = bits.new_empty(2, n_tiles, dtype=torch.int32)
        tensors = counts, high_of_tiles, low_of_tiles, *digits
        _count_chosen[triton.cdiv(n_tiles, TILES),](*tensors, n_tiles, n, TILES=TILES, num_warps=4)
        indices = bits.new_empty(n, dtype=torch.int64)
        size = 1 if groups is None else values.shape[1]
        launch(_write_chosen, indices, bits, *digits, counts, groups, GROUP=size, COUNTS=COUNTS)
    return indices


def try_out(device: torch.device) -> None:
    """Run each kernel once, letting Triton errors propagate; raise `RuntimeError` if the results are wrong."""
    values = (torch.arange(64, device=device) * 37 % 64).bfloat16().expand(2, 64).contiguous()
    columns, largest = largest_of_each(values, 3)
    kept = strongest(values, 3)
    is_chosen, smallest = are_largest(values, 3)
    is_right = (is_chosen.gather(1, columns).sum(dim=1) == is_chosen.sum(dim=1)) & (smallest == 61)
    is_right &= (largest.sum(dim=1) == 186) & (kept.gather(1, columns) == largest).all(dim=1) & (kept.sum(dim=1) == 186)
    # Test a k so large that programs hold complete rows.
    wide = (torch.arange(1024, device=device) * 37 % 1024).bfloat16().expand(2, 1024)
    is_right &= (largest_of_each(wide, 600)[1].sort().values == wide.sort().values[:, -600:]).all()
    # Test a matrix whose maxima and candidates need several tiles.
    whole = (torch.arange(2**17, device=device) * 37 % 2**17).bfloat16().view(2, -1)
    indices = largest_of_all(whole, 2048)
    found = whole.flatten().index_select(0, indices)
    is_right &= (found.sort().values == whole.flatten().sort().values[-2048:]).all() & (
        indices[1:] > indices[:-1]
    ).all()
    if not is_right.all():
        raise RuntimeError("the kernels give wrong results")


def _copied(grouped: Tensor, groups: Tensor) -> Tensor:
    """Return copies of groups; for 131,072 groups of 64 bytes, torch took 0.08 ms, as long as for the full matrix."""
    n_groups, group = len(groups), grouped.shape[1]
    copies = grouped.new_empty(n_groups, group)
    at_once = SHARED_TILE // group
    with torch.cuda.device_of(grouped):
        _copy_groups[triton.cdiv(n_groups, at_once),](
            _bits(copies), _bits(grouped), groups, n_groups, GROUP=group, AT_ONCE=at_once, num_warps=8
        )
    return copies


def _group(n: int, k: int) -> int:
    kept = triton.next_power_of_2(max(k, 1))
    group: int = max(LEAST_GROUP, min(GROUP, MOST_KEPT // kept))
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
    """Find the k largest values of one row; `inout_maxima` is scratch memory for the program."""
    row = tl.program_id(0).to(tl.int64)
    bits += row * n_columns
    inout_maxima += row * n_groups
    out_columns += row * k
    out_values += row * k
    # Padding is ordered below all numbers.
    lowest: tl.constexpr = 1 - 2 ** (BITS - 1)
    # The maximum over tiles at each position.
    largest = tl.full([AT_ONCE], lowest, tl.int32)
    for first in range(0, n_groups, AT_ONCE):
        groups = first + tl.arange(0, AT_ONCE)
        columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        numbers = tl.load(bits + columns, mask=columns < n_columns, other=INFINITY - 2 ** (BITS - 1))
        maxima = _largest_of_each(numbers, INFINITY, BITS)
        tl.store(inout_maxima + groups, maxima, mask=groups < n_groups)
        largest = tl.maximum(largest, maxima)
    # Wait until all threads have stored the maxima that other threads read.
    tl.debug_barrier()

    # Maxima at different positions come from different groups, and there are at least k positions, or one for each
    # group. Therefore, enough groups have maxima at least as large as the smallest of the maxima at these positions.
    tl.static_assert(AT_ONCE >= KEPT or AT_ONCE >= GROUPS)
    high = tl.max(largest, axis=0)
    low = tl.min(tl.where(tl.arange(0, AT_ONCE) < n_groups, largest, high), axis=0)
    groups = tl.arange(0, GROUPS)
    maxima = tl.load(inout_maxima + groups, mask=groups < n_groups, other=lowest).to(tl.int32)
    n_kept = tl.minimum(k, n_groups)
    bound, n_above = search(maxima, n_kept, low, high, BY_HALVES, BITS)
    chosen, nth = choose(maxima, n_kept, bound, n_above)
    tl.store(out_columns + nth - 1, groups, mask=chosen)
    tl.debug_barrier()

    kept = tl.arange(0, KEPT)
    is_kept = kept < n_kept
    groups = tl.load(out_columns + kept, mask=is_kept, other=0).to(tl.int32)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = is_kept[:, None] & (columns < n_columns)
    numbers = tl.load(bits + columns, mask=inside, other=0)
    ordered = tl.where(inside, _ordered(numbers, INFINITY, BITS), lowest)
    candidates = tl.reshape(ordered, [KEPT * GROUP])
    # Only k maxima and a few other values reach the groups' bound, so the values' bound is close to it. Search near the
    # groups' bound first, at the spacing of bf16 numbers.
    low, step = tl.where(k <= n_groups, bound, lowest), tl.where(k <= n_groups, 2 ** (BITS - 16), BY_HALVES)
    bound, n_above = search(candidates, k, low, high, step, BITS)
    chosen, nth = choose(candidates, k, bound, n_above)
    # Wait until all threads have read the chosen groups.
    tl.debug_barrier()
    tl.store(out_columns + nth - 1, tl.reshape(columns, [KEPT * GROUP]), mask=chosen)
    tl.debug_barrier()
    # Reload the values, since keeping all candidates' bits made sm_80 spill registers.
    columns = tl.load(out_columns + kept, mask=kept < k, other=0)
    tl.store(out_values + kept, tl.load(bits + columns, mask=kept < k, other=0), mask=kept < k)


@triton.jit
def _keep_strongest(
    out_bits, bits, n_columns, k, COLUMNS: tl.constexpr, INFINITY: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Copy the values of one row that are above 0 and among its k largest; replace all others by 0."""
    start, columns = tl.program_id(0).to(tl.int64) * n_columns, tl.arange(0, COLUMNS)
    inside = columns < n_columns
    numbers = tl.load(bits + start + columns, mask=inside, other=0)
    # Numbers ordered above 0 are positive or NaN.
    ordered = _ordered(numbers, INFINITY, BITS)
    chosen = ordered > 0
    # More than k values are positive in 1 % of the rows of dead latents, and in half of the rows that are symmetric
    # around 0.
    if tl.sum(chosen.to(tl.int32), axis=0) > k:
        bound, n_above = search(ordered, k, 1, tl.max(ordered, axis=0), BY_HALVES, BITS)
        chosen, _ = choose(ordered, k, bound, n_above)
    tl.store(out_bits + start + columns, tl.where(chosen, numbers, 0), mask=inside)


@triton.jit
def _mark_largest(
    out_chosen, out_smallest, bits, n_columns, k, COLUMNS: tl.constexpr, INFINITY: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Mark the k largest values of one row, and write the bits of the k-th largest."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    _, ordered, chosen, _ = _largest_of_one(bits + row * n_columns, columns, n_columns, k, INFINITY, BITS)
    tl.store(out_chosen + row * n_columns + columns, chosen, mask=columns < n_columns)
    smallest = tl.min(tl.where(chosen, ordered, 2 ** (BITS - 1) - 1), axis=0)
    tl.store(out_smallest + row, _bits_of(smallest, BITS).to(out_smallest.dtype.element_ty))


@triton.jit
def _gather_largest(
    out_columns, out_values, bits, n_columns, k, COLUMNS: tl.constexpr, INFINITY: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Write the columns and values of the k largest elements of one row."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    numbers, _, chosen, nth = _largest_of_one(bits + row * n_columns, columns, n_columns, k, INFINITY, BITS)
    tl.store(out_columns + row * k + nth - 1, columns.to(tl.int64), mask=chosen)
    tl.store(out_values + row * k + nth - 1, numbers, mask=chosen)


@triton.jit
def _largest_of_one(bits, columns, n_columns, k, INFINITY: tl.constexpr, BITS: tl.constexpr):
    """Return the bits of one row, the result of `_ordered`, and the result of `choose` for the k largest values."""
    inside = columns < n_columns
    numbers = tl.load(bits + columns, mask=inside, other=0)
    # Padding is ordered below −∞, and at least k values are not padding.
    ordered = tl.where(inside, _ordered(numbers, INFINITY, BITS), -INFINITY - 2)
    bound, n_above = search(ordered, k, -INFINITY - 1, tl.max(ordered, axis=0), BY_HALVES, BITS)
    chosen, nth = choose(ordered, k, bound, n_above)
    return numbers, ordered, chosen, nth


@triton.jit
def _write_maxima(
    out_maxima, bits, n_groups, GROUP: tl.constexpr, AT_ONCE: tl.constexpr, INFINITY: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Write the bits of each group's maximum in one block."""
    groups = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    # `fits_all` ensures that indices are below 2^31.
    indices = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    largest = _largest_of_each(tl.load(bits + indices, mask=(groups < n_groups)[:, None], other=0), INFINITY, BITS)
    tl.store(out_maxima + groups, _bits_of(largest, BITS).to(out_maxima.dtype.element_ty), mask=groups < n_groups)


@triton.jit
def _copy_groups(out_bits, bits, some_rows, n_groups, GROUP: tl.constexpr, AT_ONCE: tl.constexpr):
    """Copy one block of groups, given by their indices."""
    indices = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    columns, inside = tl.arange(0, GROUP)[None, :], (indices < n_groups)[:, None]
    group = tl.load(some_rows + indices, mask=indices < n_groups, other=0)[:, None]
    numbers = tl.load(bits + group * GROUP + columns, mask=inside, other=0)
    tl.store(out_bits + indices[:, None] * GROUP + columns, numbers, mask=inside)


@triton.jit
def _count_digits(
    out_of_tiles, bits, high_digits, n_values, n, TILE: tl.constexpr, INFINITY: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Count the high digits in a tile or, with `high_digits`, the low digits of values in the bound's bin.

    Other values are counted as digit 0, which does not affect the search, since it starts from the highest digit. A
    separate digit for these values, the 257th, would need 512 bins, the next power of two. For every 32 bins, each
    thread counts the bits of a mask once per value, which takes eight times as long as an addition on a GPU.
    """
    indices = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ranks = _ranks_at(bits, indices, n_values, INFINITY, BITS)
    if high_digits is None:
        digits = tl.where(ranks >= 0, ranks >> 8, 0)
    else:
        high, _ = _digit_of(high_digits, n)
        digits = tl.where((ranks >> 8) == high, ranks & 255, 0)
    tl.store(out_of_tiles + tl.program_id(0) * 256 + tl.arange(0, 256), tl.histogram(digits, 256))


@triton.jit
def _count_chosen(
    out_counts, high_of_tiles, low_of_tiles, high_digits, low_digits, n_tiles, n, TILES: tl.constexpr
):  # fmt: skip
    """From the digits of each tile, compute how many values exceed the bound, and how many equal it."""
    tiles, digits = tl.program_id(0) * TILES + tl.arange(0, TILES), tl.arange(0, 256)[None, :]
    indices, inside = tiles[:, None] * 256 + digits, (tiles < n_tiles)[:, None]
    highs = tl.load(high_of_tiles + indices, mask=inside, other=0)
    lows = tl.load(low_of_tiles + indices, mask=inside, other=0)
    high, n_left = _digit_of(high_digits, n)
    low, _ = _digit_of(low_digits, n_left)
    above = tl.sum(tl.where(digits > low, lows, 0), axis=1)
    equal = tl.sum(tl.where(digits == low, lows, 0), axis=1)
    # The count of low digit 0 includes values with another high digit.
    equal = tl.where(low > 0, equal, tl.sum(tl.where(digits == high, highs, 0), axis=1) - above)
    above += tl.sum(tl.where(digits > high, highs, 0), axis=1)
    tl.store(out_counts + tiles, above, mask=tiles < n_tiles)
    tl.store(out_counts + n_tiles + tiles, equal, mask=tiles < n_tiles)


@triton.jit
def _write_chosen(
    out_indices, bits, high_digits, low_digits, counts, groups, n_values, n,
    GROUP: tl.constexpr, COUNTS: tl.constexpr, TILE: tl.constexpr, INFINITY: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Write the indices of the values chosen from one tile, after the indices from earlier tiles."""
    tile, n_tiles = tl.program_id(0), tl.num_programs(0)
    indices = tile * TILE + tl.arange(0, TILE)
    ranks = _ranks_at(bits, indices, n_values, INFINITY, BITS)
    bound, n_equal = _bound(high_digits, low_digits, n)
    n_above_before, n_equal_before = 0, 0
    for first in range(0, tile, COUNTS):
        tiles = first + tl.arange(0, COUNTS)
        n_above_before += tl.sum(tl.load(counts + tiles, mask=tiles < tile, other=0), axis=0)
        n_equal_before += tl.sum(tl.load(counts + n_tiles + tiles, mask=tiles < tile, other=0), axis=0)
    above, equal = (ranks > bound).to(tl.int32), (ranks == bound).to(tl.int32)
    nth_equal = n_equal_before + tl.cumsum(equal, axis=0)
    chosen = (above == 1) | ((equal == 1) & (nth_equal <= n_equal))
    nth = n_above_before + tl.cumsum(above, axis=0) + tl.minimum(nth_equal, n_equal)
    written = indices.to(tl.int64)
    if groups is not None:
        group = tl.load(groups + indices // GROUP, mask=chosen, other=0)
        written = group * GROUP + indices % GROUP
    tl.store(out_indices + nth - 1, written, mask=chosen)


@triton.jit
def _ranks_at(bits, indices, n_values, INFINITY: tl.constexpr, BITS: tl.constexpr):
    """Map 16-bit values to integers that start at 0 and have the same order; padding becomes −1."""
    inside = indices < n_values
    ordered = _ordered(tl.load(bits + indices, mask=inside, other=0), INFINITY, BITS)
    return tl.where(inside, ordered + 2 ** (BITS - 1), -1)


@triton.jit
def _bound(high_digits, low_digits, n):
    """Return the rank of the n-th largest value, and how many of the n largest values equal it."""
    high, n_left = _digit_of(high_digits, n)
    low, n_equal = _digit_of(low_digits, n_left)
    return high * 256 + low, n_equal


@triton.jit
def _digit_of(counts, n):
    """Return the digit of the n-th largest value from the counts of digits, and its position among equal digits."""
    digits = tl.arange(0, 256)
    of_each = tl.load(counts + digits)
    # The number of values with this digit or a higher one.
    from_here = tl.sum(of_each, axis=0) - tl.cumsum(of_each, axis=0) + of_each
    digit = tl.max(tl.where(from_here >= n, digits, 0), axis=0)
    return digit, n - tl.sum(tl.where(digits > digit, of_each, 0), axis=0)


@triton.jit
def _largest_of_each(bits, INFINITY: tl.constexpr, BITS: tl.constexpr):
    """Return the maximum of each row of floating-point numbers, given as bits, in the form of `_ordered`.

    Widening a number takes one instruction and comparing it two or three: 6 in total on sm_90. Applying `_ordered` to
    each number took 13 instructions, and on an H200, this took twice as long as reading the numbers.
    """
    # First reduce the values that a thread loads at once, so that threads exchange one number instead of three.
    wide = tl.reshape(bits.to(tl.int32), [bits.shape[0], bits.shape[1] // 8, 8])
    largest, least = tl.max(wide, axis=2), tl.min(wide, axis=2)
    # As unsigned integers, negative numbers exceed all others: the maximum is the one farthest from 0, or NaN.
    highest = tl.max(wide.to(tl.uint32, bitcast=True), axis=2).to(tl.int32, bitcast=True)
    is_nan = (largest > INFINITY) | ((highest < 0) & (highest > INFINITY - 2 ** (BITS - 1)))
    all_ones = 2 ** (BITS - 1) - 1
    return tl.max(tl.where(is_nan, all_ones, tl.where(largest < 0, least ^ all_ones, largest)), axis=1)


@triton.jit
def _ordered(bits, INFINITY: tl.constexpr, BITS: tl.constexpr):
    """Map the bits of floats to int32 keys that sort like the floats; NaN sorts above all other values."""
    wide, all_ones = bits.to(tl.int32), 2 ** (BITS - 1) - 1
    size = wide & all_ones
    return tl.where(size > INFINITY, all_ones, tl.where(wide < 0, wide ^ all_ones, wide))


@triton.jit
def _bits_of(ordered, BITS: tl.constexpr):
    """Return the bits for results of `_ordered`; NaN becomes all ones."""
    return tl.where(ordered < 0, ordered ^ (2 ** (BITS - 1) - 1), ordered)


@triton.jit
def search(ordered, k, low, high, step, BITS: tl.constexpr):
    """Return a bound that at most k values exceed, and the number of values that exceed it.

    If fewer than k values exceed the bound, at least k values are greater than or equal to it. No value may exceed
    `high`, and at least k values must be greater than or equal to `low`. The search starts from `low` with growing
    steps, and then bisects.
    """
    # A search for two bits at a time was slower on an H200, since comparisons dominate.
    wide: tl.constexpr = tl.int64 if BITS == 32 else tl.int32
    low, high, step = tl.cast(low, wide), tl.cast(high, wide), tl.cast(step, wide)
    n_above = 0
    while (low < high) & (n_above != k):
        step = tl.minimum(step, (high - low) // 2)
        n = tl.sum((ordered > (low + step).to(tl.int32)).to(tl.int32), axis=0)
        if n <= k:
            high, n_above = low + step, n
        else:
            low += step + 1
            step *= 4
    return high.to(tl.int32), n_above


@triton.jit
def choose(ordered, k, bound, n_above):
    """Return a mask [n] of the k largest values, with ties in order, and the inclusive count of chosen values [n]."""
    above, equal = ordered > bound, ordered == bound
    # Neither count reaches 2^16.
    counts = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    n_equal, n_wanted = counts >> 16, k - n_above
    return above | (equal & (n_equal <= n_wanted)), (counts & 0xFFFF) + tl.minimum(n_equal, n_wanted)
