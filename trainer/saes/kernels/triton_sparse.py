"""Sparse matmuls on a GPU. Inputs are fp32, bf16 or fp16; every sum is fp32.

The host never waits, since grids depend only on shapes. A program handles one block of columns, and programs for the
same block run consecutively, so that the gathered slice fits into the L2 cache: 128 columns of 65,536 bf16 rows take 16
MiB, as do all 2,304 columns of 4,096 rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.saes.sparse_acts import Filled, SparseActs, SparseIndices

# The maximum number of a latent's entries that one program sums; if there are more, they are split among programs.
# Without this limit, a latent that is active on all 4,096 tokens would keep one program busy long after the other
# programs have finished.
LONGEST = 256
# The number of rows that a program sums, and the number of rows and columns that it holds at a time: 32 numbers per
# thread. With sequential chunks of 256 rows, an H200 took 0.13 ms for 65,536 rows of 2,304; just reading them takes
# 0.08 ms.
_WEIGHED = {"OF_PROGRAM": 64, "ROWS": 16, "COLUMNS": 256, "num_warps": 4}
# The number of latents per program that merges the measurements of column parts.
JOINED = 256
# The number of activations summed at a time.
OF_TOTAL = tl.constexpr(32)
# The number of values that a program holds at a time: 32 per thread.
TILE = 4096
# At least `MANY` programs fill a GPU even if each holds so few values that one warp suffices. For the sums of 4,096
# bags of 32 rows of 768, an H200 took 0.14 ms with 4 warps and 0.03 ms with one; for bags of 64 rows of 2,304, it took
# 0.50 ms and 0.16 ms.
MANY, FEW_ENTRIES, FEW_COLUMNS = 4096, 4, 256
# The slice size in bytes. A slice and the streamed data fit into half of the smallest L2 cache of current data-centre
# GPUs (A100: 40 MB).
SLAB_BYTES = 16 * 2**20
# The slice size in bytes if all streamed data is used only once and is marked for early eviction.
DENSE_BYTES = 20 * 10**6
# The maximum number of columns per latent that one program sums, and the approximate number of columns per thread. The
# latter is halved if rows are not aligned to vectors, since Triton 3.6 would otherwise spill registers. On an H200, a
# few warps that read one entry at a time are fastest: for 65,536 latents, 4,096 tokens, k = 64 and width 2,304, two
# warps took 0.59 ms with products and 0.25 ms without; 8 and 4 warps with four entries at a time took 1.63 ms and 1.07
# ms.
WIDEST, PER_THREAD, VECTOR = 4096, 40, 16


def bag_sums(
    values: Tensor,
    indices: Tensor,
    starts: Tensor,
    rows: Tensor,
    filled: Filled | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the sum of values[i] · rows[indices[i]] over each bag, in `dtype` [n_bags, d]; additions are in fp32.

    Bag b starts at entry `starts[b]`. The order of the additions is fixed. Entries beyond the `filled` ones belong to
    no bag.
    """
    n_entries, n_bags, n_columns = len(values), len(starts), rows.shape[1]
    n_filled, n_expected = filled or (None, n_entries)
    out = rows.new_empty(n_bags, n_columns, dtype=dtype)
    shape = _tile(_power_of_two(n_expected // max(n_bags, 1), least=4, most=32), n_columns, n_bags)
    if out.numel():
        grid = n_bags, triton.cdiv(n_columns, shape["COLUMNS"])
        tensors = out, values.contiguous(), indices, starts, rows.contiguous(), n_filled
        # Triton launches kernels on the current device, not necessarily on the tensors' device.
        with torch.cuda.device_of(rows):
            _sum_bags[grid](*tensors, n_entries, n_columns, **shape)
    return out


class SumBuffers(NamedTuple):
    """Output buffers, fp32 [d_sae], for measurements of each latent's sum.

    `out_squares` receives the squared norm of the sum. With `unit_rows` [d_sae, d], the squared norm is only that of
    the component orthogonal to the unit row, and `out_dots` receives the inner product with the unit row. If the
    columns are split, the buffers are [n_parts, d_sae] and treat each part as a row; `out_lengths` then receives the
    norms of the parts of the unit rows.
    """

    out_squares: Tensor
    out_dots: Tensor | None = None
    unit_rows: Tensor | None = None
    out_lengths: Tensor | None = None


class Summed(NamedTuple):
    """The sums for all latents, fp32 [d_sae, d].

    `products`, one per entry, are fp32 [n]; `totals`, the summed activations of each latent, are fp32 [d_sae]. Either
    `products` or `totals` is None. `shared` [m] contains all latents that several programs sum, and possibly others.
    """

    sums: Tensor
    products: Tensor | None
    totals: Tensor | None
    shared: Tensor | None


def sum_by_latent(
    acts: SparseActs,
    dense: Tensor,
    rows: Tensor | None = None,
    factor: Tensor | None = None,
    *,
    splits: bool,
    measured: SumBuffers | None = None,
) -> Summed:
    """Return actsᵀ @ dense for `dense` [n_tokens, d], multiplied by `factor` (0-dim) if given.

    Without `rows`, also return the sum of each latent's activations. With `rows` [d_sae, d], also return the inner
    product of each entry's row of `dense` and its latent's row, computed from the same gathered data. The order of the
    additions is fixed unless `splits`: then a latent's entries beyond its first `LONGEST` are added to its row
    atomically, in any order. Entries beyond the `filled` ones belong to no latent; their products are 0. The squared
    norm of each latent's sum is written to `measured`, except for latents whose entries are split among several
    programs.
    """
    indices, d_sae = acts.indices, acts.d_sae
    (order, starts), filled = indices.by_latent(d_sae), indices.filled
    n_entries, (n_parts, _) = len(order), _parts(dense)
    shape = _pieces(dense)
    sums = dense.new_empty(d_sae, dense.shape[1], dtype=torch.float32)
    totals = dense.new_empty(d_sae, dtype=torch.float32) if rows is None else None
    make = dense.new_empty if filled is None else dense.new_zeros
    products = None if rows is None else make(n_parts, n_entries, dtype=torch.float32)
    tensors = {
        "out": sums,
        "out_products": products,
        "out_totals": totals,
        "values": acts.values.index_select(0, order),
        "tokens": indices.tokens_by_latent(d_sae),
        "order": order,
        "starts": starts,
        "dense": dense.contiguous(),
        "rows": None if rows is None else rows.contiguous(),
        "factor": factor,
        "n_filled": None if filled is None else filled.n,
    }
    longest = LONGEST if splits else n_entries
    sizes = {"n_entries": n_entries, "n_latents": d_sae, "n_columns": dense.shape[1], "longest": longest}
    of_parts = measured if measured is None or n_parts == 1 else _of_parts(measured, n_parts)
    unmeasured = dict.fromkeys(SumBuffers._fields)
    measuring = of_parts._asdict() if of_parts else unmeasured
    # Only these latents can have entries in a window beyond their first `longest` entries.
    shared = indices.latents_of_windows(d_sae, longest) if n_entries > longest else None
    if sums.numel():
        with torch.cuda.device_of(dense):
            _sum_by_latent[d_sae, n_parts](**tensors, **measuring, latents=None, **sizes, **shape)
            if shared is not None:
                _sum_by_latent[len(shared), n_parts](**tensors, **unmeasured, latents=shared, **sizes, **shape)
            if measured and of_parts and n_parts > 1:
                _join(of_parts, measured)
    if products is not None:
        products = products[0] if n_parts == 1 else products.sum(dim=0)
    return Summed(sums, products, totals, shared)


def _of_parts(measured: SumBuffers, n_parts: int) -> SumBuffers:
    """Allocate the measurements of column parts."""
    squares, dots, lengths = measured.out_squares.new_empty(3, n_parts, len(measured.out_squares))
    return SumBuffers(squares) if measured.out_dots is None else SumBuffers(squares, dots, measured.unit_rows, lengths)


def _join(of_parts: SumBuffers, measured: SumBuffers) -> None:
    """Merge the measurements of column parts into the measurements of full rows."""
    squares, dots, _, lengths = of_parts
    n_parts, n_latents = squares.shape
    tensors = measured.out_squares, measured.out_dots, squares, dots, lengths
    _join_measures[triton.cdiv(n_latents, JOINED),](*tensors, n_parts, n_latents, LATENTS=JOINED, num_warps=4)


def _parts(dense: Tensor) -> tuple[int, int]:
    """Return the number of column parts of `dense` and the number of columns per part, a multiple of `VECTOR`."""
    n_columns = max(dense.shape[1], 1)
    n_parts = max(triton.cdiv(n_columns, WIDEST), triton.cdiv(dense.nbytes, DENSE_BYTES))
    of_part = VECTOR * triton.cdiv(triton.cdiv(n_columns, n_parts), VECTOR)
    return triton.cdiv(n_columns, of_part), of_part


def _pieces(dense: Tensor) -> dict[str, int]:
    """Return the launch options for column parts; a program splits its part into two blocks of columns.

    The block size must be a power of two: 2,304 columns become 2,048 and 256; a single block would need 4,096.
    """
    _, of_part = _parts(dense)
    near = triton.next_power_of_2(of_part // 2 + 1)
    far = triton.next_power_of_2(max(of_part - near, 1))
    warps = triton.cdiv(near + far, 32 * (PER_THREAD if dense.shape[1] % VECTOR == 0 else PER_THREAD // 2))
    shape = {"of_part": of_part, "NEAR": near, "FAR": far}
    return shape | {"num_warps": triton.next_power_of_2(warps), "enable_fp_fusion": True}


def row_products(dense: Tensor, rows: Tensor, indices: Tensor, starts: Tensor, filled: Filled | None = None) -> Tensor:
    """Return the inner product dense[b] · rows[indices[i]] for each entry i of bag b, fp32 [n].

    The order of the additions is fixed. Entries beyond the `filled` ones belong to no bag; their result is 0.
    """
    n_entries, n_bags, n_columns = len(indices), len(starts), rows.shape[1]
    n_filled, n_expected = filled or (None, n_entries)
    # If bags are short, a tile with more entries would be mostly empty.
    shape = _tile(_power_of_two(n_expected // max(n_bags, 1), least=8, most=32), n_columns, n_bags)
    # If all rows together exceed the cache, each program multiplies only one part of the columns.
    n_blocks = triton.cdiv(n_columns, shape["COLUMNS"])
    blocks_per_part = triton.cdiv(n_blocks, triton.cdiv(rows.nbytes, SLAB_BYTES))
    n_parts = triton.cdiv(n_blocks, blocks_per_part)
    make = rows.new_empty if filled is None else rows.new_zeros
    out = make(n_parts, n_entries, dtype=torch.float32)
    if n_entries:
        tensors = out, dense.contiguous(), rows.contiguous(), indices, starts, n_filled
        with torch.cuda.device_of(rows):
            _multiply_rows[n_bags, n_parts](*tensors, n_entries, n_columns, blocks_per_part * shape["COLUMNS"], **shape)
    return out[0] if n_parts == 1 else out.sum(dim=0)


def weighted_sum(weights: Tensor, rows: Tensor, factor: float) -> Tensor:
    """Return factor · Σ weights[i] · rows[i] for rows [n, d]: fp32 [d]; the order of the additions is fixed."""
    n_rows, n_columns = rows.shape
    grid = triton.cdiv(n_rows, _WEIGHED["OF_PROGRAM"]), triton.cdiv(n_columns, _WEIGHED["COLUMNS"])
    out = rows.new_empty(grid[0], n_columns, dtype=torch.float32)
    if out.numel():
        with torch.cuda.device_of(rows):
            _weigh_rows[grid](out, weights, rows.contiguous(), n_rows, n_columns, factor, **_WEIGHED)
    return out.sum(dim=0)


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """Run each kernel once with rows of this dtype.

    Triton errors propagate; raise `RuntimeError` if the results are wrong.
    """
    n = LONGEST + 1
    values, rows = torch.ones(n, device=device), torch.ones(1, 16, device=device, dtype=dtype)
    zeros = torch.zeros(n, dtype=torch.int64, device=device)
    starts = zeros[:1]
    sums, products = bag_sums(values, zeros, starts, rows), row_products(rows, rows, zeros, starts)
    # Test with a single column part and with several column parts.
    of_both = (n, 48), (1, WIDEST + VECTOR)
    are_right = [_sums_of_latents_are_right(device, dtype, *of_one) for of_one in of_both]
    are_right += [bool((weighted_sum(values, rows.expand(n, -1), -2.0) == -2 * n).all())]
    are_right += [torch.equal(bag_sums(values, zeros, starts, rows, dtype=dtype), sums.to(dtype))]
    if not (sums == n).all() or not (products == 16).all() or not all(are_right):
        raise RuntimeError("the kernels give wrong results")


def _sums_of_latents_are_right(device: torch.device, dtype: torch.dtype, n: int, width: int) -> bool:
    """Return whether the sums, products and row norms of two latents are correct.

    The entries of the first latent, an odd number n, are split among programs. The last entry is padding.
    """
    entries = torch.arange(n + 2, device=device)
    latents, tokens, filled = (entries >= n).long(), entries % 2, Filled(torch.tensor(n + 1, device=device), n + 1)
    acts = SparseActs(torch.ones(n + 2, device=device), SparseIndices(latents, tokens, entries[:2], filled), 2)
    dense = torch.tensor([[1.0], [3.0]], device=device, dtype=dtype).expand(2, width)
    unit_rows = torch.full((2, width), width**-0.5, device=device)
    squares, dots = torch.empty(2, device=device), torch.empty(2, device=device)
    measured = SumBuffers(squares, dots, unit_rows)
    factor = torch.full((), 0.5, device=device)
    given = acts, 2 * dense, torch.ones_like(dense), factor
    sums, products, *_ = sum_by_latent(*given, splits=True, measured=measured)
    assert products is not None, "there are products, since rows were given"
    whole = torch.tensor([[n // 2 * 4 + 1.0], [3.0]], device=device)
    are_right = (sums == whole).all() & (products[: n + 1] == width * (1 + 2 * tokens[: n + 1])).all()
    totals = sum_by_latent(acts, dense, splits=True).totals
    assert totals is not None, "there are totals, since no rows were given"
    are_right &= (totals == torch.tensor([n, 1.0], device=device)).all()
    # Several programs may have summed the first latent, so its measurements may be missing.
    return bool(are_right & (squares[1] < 1e-3) & ((dots[1] / width**0.5 - 3).abs() < 1e-3))


def _power_of_two(number: int, *, least: int, most: int) -> int:
    power: int = triton.next_power_of_2(max(number, 1))
    return min(max(power, least), most)


def _tile(entries: int, n_columns: int, n_bags: int) -> dict[str, int]:
    most = TILE // max(entries, 8)
    if n_bags * triton.cdiv(n_columns, FEW_COLUMNS) >= MANY:
        entries, most = FEW_ENTRIES, FEW_COLUMNS
    columns = _power_of_two(n_columns, least=16, most=most)
    warps = max(1, entries * columns // 1024)
    # Set `enable_fp_fusion` explicitly, since Triton 3.10 no longer enables it by default.
    return {"ENTRIES": entries, "COLUMNS": columns, "num_warps": warps, "enable_fp_fusion": True}


@triton.jit
def _sum_bags(
    out, values, indices, starts, rows, n_filled, n_entries, n_columns,
    ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the rows of one bag in one block of columns."""
    bag = tl.program_id(0)
    end = n_entries if n_filled is None else tl.load(n_filled)
    first = tl.load(starts + bag).to(tl.int32)
    last = tl.load(starts + bag + 1, mask=bag + 1 < tl.num_programs(0), other=end).to(tl.int32)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ENTRIES, COLUMNS], dtype=tl.float32)
    for begin in range(first, last, ENTRIES):
        entries = begin + tl.arange(0, ENTRIES)
        value = tl.load(values + entries, mask=entries < last, other=0).to(tl.float32)
        total += value[:, None] * gather(rows, indices, entries, last, columns, n_columns)
    tl.store(out + bag.to(tl.int64) * n_columns + columns, tl.sum(total, axis=0), mask=columns < n_columns)


@triton.jit
def _sum_by_latent(
    out, out_products, out_totals, out_squares, out_dots, out_lengths, values, tokens, order, starts, dense,
    rows, factor, unit_rows, latents, n_filled, n_entries, n_latents, n_columns, longest, of_part,
    NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Sum one latent's first `longest` entries in one column part, and multiply each entry by the latent's row.

    Both results are multiplied by `factor` if given. With `latents`, process a window of `longest` entries instead: add
    the window's entries that are not among the first `longest` entries of their latent. All of these entries belong to
    the first latent in the window, since every other latent starts within the window.
    """
    latent, part = tl.program_id(0), tl.program_id(1)
    if latents is not None:
        window = latent
        latent = tl.load(latents + window).to(tl.int32)
    end = n_entries if n_filled is None else tl.load(n_filled)
    first = tl.load(starts + latent).to(tl.int32)
    last = tl.load(starts + latent + 1, mask=latent + 1 < n_latents, other=end).to(tl.int32)
    if latents is None:
        last = tl.minimum(last, first + longest)
    else:
        first = tl.maximum(window * longest, first + longest)
        last = tl.minimum((window + 1) * longest, last)

    left = part * of_part
    near, far = left + tl.arange(0, NEAR), left + NEAR + tl.arange(0, FAR)
    right = tl.minimum(left + of_part, n_columns)
    # If a window adds nothing, read and write no columns.
    right = tl.where((first < last) | (latents is None), right, left)
    row = latent.to(tl.int64) * n_columns
    near_total, far_total = tl.zeros([NEAR], dtype=tl.float32), tl.zeros([FAR], dtype=tl.float32)
    times = 1.0 if factor is None else tl.load(factor)
    if rows is not None:
        near_row, far_row = _once(rows + row + near, near < right), _once(rows + row + far, far < right)
    for entry in range(first, last):
        value = tl.load(values + entry).to(tl.float32)
        token = tl.load(tokens + entry).to(tl.int64) * n_columns
        product = 0.0
        # Process the small block first; in the other order, sm_120 spills registers.
        if FAR > 1:
            numbers = _gathered(dense + token + far, far < right)
            far_total += value * numbers
            if rows is not None:
                product += tl.sum(numbers * far_row, axis=0)
        numbers = _gathered(dense + token + near, near < right)
        near_total += value * numbers
        if rows is not None:
            product += tl.sum(numbers * near_row, axis=0)
            tl.store(out_products + part.to(tl.int64) * n_entries + tl.load(order + entry), product * times)
    near_total *= times
    far_total *= times
    # Do not compute the total in the loop or together with products, since sm_80 and sm_90 would then spill registers.
    # The conditions are nested, since Triton 3.2 would compile the block of a combined condition even without totals.
    if out_totals is not None:  # noqa: SIM102
        if part == 0:
            total = _total(values, first, last)
            _put(out_totals + latent, total, (first < last) | (latents is None), latents is not None)
    _put(out + row + near, near_total, near < right, latents is not None)
    if FAR > 1:
        _put(out + row + far, far_total, far < right, latents is not None)
    if out_squares is not None:
        measures = part * n_latents + latent
        if unit_rows is not None:
            # Loading these rows before the loop would double the number of registers. With the two rows loaded in the
            # opposite order, sm_86 and sm_89 would spill registers.
            far_row = _once(unit_rows + row + far, far < right)
            near_row = _once(unit_rows + row + near, near < right)
            if out_lengths is not None:
                length = tl.sqrt(tl.sum(near_row * near_row, axis=0) + tl.sum(far_row * far_row, axis=0))
                tl.store(out_lengths + measures, length)
                length = tl.where(length > 0, length, 1)
                near_row /= length
                far_row /= length
            dot = tl.sum(near_total * near_row, axis=0) + tl.sum(far_total * far_row, axis=0)
            tl.store(out_dots + measures, dot)
            # Subtract the projection before squaring, since a difference of squares would lose precision.
            near_total -= dot * near_row
            far_total -= dot * far_row
        square = tl.sum(near_total * near_total, axis=0) + tl.sum(far_total * far_total, axis=0)
        tl.store(out_squares + measures, square)


@triton.jit
def _total(values, first, last):
    """Sum the values from index `first` to `last`, block by block."""
    total = 0.0
    for entry in range(first, last, OF_TOTAL):
        entries = entry + tl.arange(0, OF_TOTAL)
        total += tl.sum(tl.load(values + entries, mask=entries < last, other=0).to(tl.float32), axis=0)
    return total


@triton.jit
def _join_measures(
    out_squares, out_dots, squares, dots, lengths, n_parts, n_latents, LATENTS: tl.constexpr
):  # fmt: skip
    """Merge the measurements of each latent's column parts, for one block of latents."""
    latents = tl.program_id(0) * LATENTS + tl.arange(0, LATENTS)
    inside = latents < n_latents
    square, whole = tl.zeros([LATENTS], dtype=tl.float32), tl.zeros([LATENTS], dtype=tl.float32)
    if dots is not None:
        for part in range(n_parts):
            at = part * n_latents + latents
            whole += tl.load(dots + at, mask=inside, other=0) * tl.load(lengths + at, mask=inside, other=0)
        tl.store(out_dots + latents, whole, mask=inside)
    for part in range(n_parts):
        at = part * n_latents + latents
        square += tl.load(squares + at, mask=inside, other=0)
        if dots is not None:
            # The projection of a part differs from that part of the full row's projection. Add the square of the
            # difference to the squared norm orthogonal to the row.
            own = tl.load(dots + at, mask=inside, other=0)
            beside = own - whole * tl.load(lengths + at, mask=inside, other=0)
            square += beside * beside
    tl.store(out_squares + latents, square, mask=inside)


@triton.jit
def _weigh_rows(
    out, weights, rows, n_rows, n_columns, factor,
    OF_PROGRAM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the weighted sum of one block of rows, in one block of columns."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in tl.static_range(0, OF_PROGRAM, ROWS):
        row = tl.program_id(0) * OF_PROGRAM + begin + tl.arange(0, ROWS)
        inside = (row < n_rows)[:, None] & (columns < n_columns)[None, :]
        weight = tl.load(weights + row, mask=row < n_rows, other=0).to(tl.float32)
        total += weight[:, None] * _once(rows + row.to(tl.int64)[:, None] * n_columns + columns[None, :], inside)
    at = out + tl.program_id(0).to(tl.int64) * n_columns + columns
    tl.store(at, factor * tl.sum(total, axis=0), mask=columns < n_columns)


@triton.jit
def _once(indices, mask):
    """Load values read by no other program, as fp32."""
    return tl.load(indices, mask=mask, other=0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _gathered(indices, mask):
    """Load values as fp32 and keep them in the cache, since kernels read only these values more than once."""
    return tl.load(indices, mask=mask, other=0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def _put(indices, totals, mask, ADDS: tl.constexpr):
    if ADDS:
        tl.atomic_add(indices, totals, mask=mask, sem="relaxed")
    else:
        tl.store(indices, totals, mask=mask, eviction_policy="evict_first")


@triton.jit
def _multiply_rows(
    out,
    dense,
    rows,
    indices,
    starts,
    n_filled,
    n_entries,
    n_columns,
    columns_per_part,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the inner products of one bag's entries in one column part."""
    bag, part = tl.program_id(0), tl.program_id(1)
    end = n_entries if n_filled is None else tl.load(n_filled)
    first = tl.load(starts + bag).to(tl.int32)
    last = tl.load(starts + bag + 1, mask=bag + 1 < tl.num_programs(0), other=end).to(tl.int32)
    left = part * columns_per_part
    for begin in range(first, last, ENTRIES):
        entries = begin + tl.arange(0, ENTRIES)
        total = tl.zeros([ENTRIES, COLUMNS], dtype=tl.float32)
        for offset in range(0, columns_per_part, COLUMNS):
            columns = left + offset + tl.arange(0, COLUMNS)
            whole = tl.load(dense + bag.to(tl.int64) * n_columns + columns, mask=columns < n_columns, other=0)
            total += whole.to(tl.float32)[None, :] * gather(rows, indices, entries, last, columns, n_columns)
        tl.store(out + part.to(tl.int64) * n_entries + entries, tl.sum(total, axis=1), mask=entries < last)


@triton.jit
def gather(rows, indices, entries, last, columns, n_columns):
    """Return rows[indices[entries]] in one block of columns, as fp32, with 0 outside the bag and the matrix."""
    row = tl.load(indices + entries, mask=entries < last, other=0).to(tl.int64)
    inside = (entries < last)[:, None] & (columns < n_columns)[None, :]
    return tl.load(rows + row[:, None] * n_columns + columns[None, :], mask=inside, other=0).to(tl.float32)
