"""Sparse products on a GPU. Inputs are fp32, bf16 or fp16; every sum is fp32.

No kernel waits for the host: grids follow from shapes. A program takes a block of columns, and programs of the same
columns run one after the other, so that the part of the rows they gather from is small enough for the L2 cache: of
65,536 bf16 rows 128 columns are 16 MiB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.saes.sparse_acts import Filled

# Entries that one program adds up; a bag of more is shared by several. A latent active for every one of 4,096 tokens
# would else keep one program busy long after all others are done.
LONGEST = 256
# Numbers a program holds at a time, 32 for each of its threads.
TILE = 4096
# Half of the L2 cache of the smallest data-centre card still in use (A100: 40 MB) holds this and what passes by.
SLAB_BYTES = 16 * 2**20


def bag_sums(
    values: Tensor, indices: Tensor, starts: Tensor, rows: Tensor, filled: Filled | None = None, *, splits: bool
) -> Tensor:
    """Sum values[i] · rows[indices[i]] over each bag's entries: fp32 [n_bags, d]; bag b's entries begin at `starts[b]`.

    With `splits` the entries of a bag beyond its first `LONGEST` are added atomically, in any order. Entries that are
    not `filled` are in no bag.
    """
    n_entries, n_bags, n_columns = len(values), len(starts), rows.shape[1]
    n_filled, n_expected = filled or (None, n_entries)
    out = rows.new_empty(n_bags, n_columns, dtype=torch.float32)
    tensors = out, values.contiguous(), indices, starts, rows.contiguous()
    longest = LONGEST if splits else n_entries
    n_entries_at_once = _power_of_two(n_expected // max(n_bags, 1), least=4, most=32)
    shape = _tile(n_entries_at_once, n_columns)
    column_blocks = triton.cdiv(n_columns, shape["COLUMNS"])
    if not out.numel():
        return out
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(rows):
        _sum_bags[n_bags, column_blocks](*tensors, n_filled, n_entries, n_columns, longest, **shape)
        if n_entries > longest:
            _add_the_rest(*tensors, n_filled, longest)
    return out


def _add_the_rest(
    out: Tensor, values: Tensor, indices: Tensor, starts: Tensor, rows: Tensor, n_filled: Tensor | None, longest: int
) -> None:
    n_entries, (n_bags, n_columns) = len(values), out.shape
    windows = torch.arange(0, n_entries, longest, device=starts.device)
    # The last of several bags that begin at the same entry is the one that has it.
    bags = torch.searchsorted(starts, windows, right=True) - 1
    shape = _tile(32, n_columns)
    grid = len(windows), triton.cdiv(n_columns, shape["COLUMNS"])
    tensors = out, values, indices, starts, rows, bags
    _add_rest[grid](*tensors, n_filled, n_entries, n_bags, n_columns, longest, **shape)


def row_products(dense: Tensor, rows: Tensor, indices: Tensor, starts: Tensor, filled: Filled | None = None) -> Tensor:
    """Return dense[b] · rows[indices[i]] for each entry i of bag b, fp32 [n]; the order of the sums is fixed.

    Entries that are not `filled` are in no bag and get 0.
    """
    n_entries, n_bags, n_columns = len(indices), len(starts), rows.shape[1]
    n_filled, n_expected = filled or (None, n_entries)
    # Short bags would leave most of a taller tile empty.
    shape = _tile(_power_of_two(n_expected // max(n_bags, 1), least=8, most=32), n_columns)
    # Where all rows are more than the cache holds, each program multiplies a part of the columns.
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


def try_out(device: torch.device) -> None:
    """Run every kernel once; raise what Triton raises where it cannot, and `RuntimeError` where results are wrong."""
    n = LONGEST + 1
    ones, zeros = torch.ones(n, 16, device=device), torch.zeros(n, dtype=torch.int64, device=device)
    starts = zeros[:1]
    sums = bag_sums(ones[:, 0], zeros, starts, ones[:1], splits=True)
    products = row_products(ones[:1], ones[:1], zeros, starts)
    if not (sums == n).all() or not (products == 16).all():
        raise RuntimeError("the kernels give wrong results")


def _power_of_two(number: int, *, least: int, most: int) -> int:
    power: int = triton.next_power_of_2(max(number, 1))
    return min(max(power, least), most)


def _tile(entries: int, n_columns: int) -> dict[str, int]:
    columns = _power_of_two(n_columns, least=16, most=TILE // max(entries, 8))
    warps = max(1, entries * columns // 1024)
    # Set explicitly, since Triton 3.10 no longer does so by itself.
    return {"ENTRIES": entries, "COLUMNS": columns, "num_warps": warps, "enable_fp_fusion": True}


@triton.jit
def _sum_bags(
    out,
    values,
    indices,
    starts,
    rows,
    n_filled,
    n_entries,
    n_columns,
    longest,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum one bag, or its first `longest` entries, in one block of columns."""
    bag = tl.program_id(0)
    end = n_entries if n_filled is None else tl.load(n_filled)
    first = tl.load(starts + bag).to(tl.int32)
    last = tl.load(starts + bag + 1, mask=bag + 1 < tl.num_programs(0), other=end).to(tl.int32)
    last = tl.minimum(last, first + longest)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = _sum_rows(values, indices, rows, first, last, columns, n_columns, ENTRIES, COLUMNS)
    tl.store(out + bag.to(tl.int64) * n_columns + columns, total, mask=columns < n_columns)


@triton.jit
def _add_rest(
    out,
    values,
    indices,
    starts,
    rows,
    bags,
    n_filled,
    n_entries,
    n_bags,
    n_columns,
    longest,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add those of a window of `longest` entries that lie beyond the first `longest` of their bag.

    They are of one bag at most, the one in which the window begins: any other begins later.
    """
    window = tl.program_id(0)
    bag = tl.load(bags + window)
    end = n_entries if n_filled is None else tl.load(n_filled)
    bag_first = tl.load(starts + bag).to(tl.int32)
    bag_last = tl.load(starts + bag + 1, mask=bag + 1 < n_bags, other=end).to(tl.int32)
    first = tl.maximum(window * longest, bag_first + longest)
    last = tl.minimum((window + 1) * longest, bag_last)
    if first < last:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = _sum_rows(values, indices, rows, first, last, columns, n_columns, ENTRIES, COLUMNS)
        place = out + bag.to(tl.int64) * n_columns + columns
        tl.atomic_add(place, total, mask=columns < n_columns, sem="relaxed")


@triton.jit
def _sum_rows(values, indices, rows, first, last, columns, n_columns, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return Σ values[i] · rows[indices[i]] for first ≤ i < last."""
    total = tl.zeros([ENTRIES, COLUMNS], dtype=tl.float32)
    for begin in range(first, last, ENTRIES):
        entries = begin + tl.arange(0, ENTRIES)
        value = tl.load(values + entries, mask=entries < last, other=0).to(tl.float32)
        numbers = _gather(rows, indices, entries, last, columns, n_columns)
        total += value[:, None] * numbers
    return tl.sum(total, axis=0)


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
    """Multiply the rows of one bag's entries in one part of the columns."""
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
            total += whole.to(tl.float32)[None, :] * _gather(rows, indices, entries, last, columns, n_columns)
        tl.store(out + part.to(tl.int64) * n_entries + entries, tl.sum(total, axis=1), mask=entries < last)


@triton.jit
def _gather(rows, indices, entries, last, columns, n_columns):
    """Return rows[indices[entries]] in some columns, as fp32; 0 outside."""
    row = tl.load(indices + entries, mask=entries < last, other=0).to(tl.int64)
    inside = (entries < last)[:, None] & (columns < n_columns)[None, :]
    return tl.load(rows + row[:, None] * n_columns + columns[None, :], mask=inside, other=0).to(tl.float32)
