"""The errors of reconstructions on a GPU, with all that is summed of them and of their targets, in one pass.

The order of the sums is fixed: a program adds up some rows, and its sums are added to those of others afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.saes.kernels.triton_sparse import gather
from trainer.saes.losses import Moments, Sums
from trainer.saes.sparse_acts import Filled, Places, SparseActs

# Rows that a program adds up, those and the columns that it holds at a time: 16 numbers of each sum a thread, which has
# all rows of its columns, or 8 where it has the sums of several levels, so that none spill.
_TILE = {"OF_PROGRAM": 32, "COLUMNS": 256, "num_warps": 2}
# Rows and columns of a program that adds two matrices, 16 numbers a thread.
_ADDED = {"ROWS": 16, "COLUMNS": 256}
# Columns of a program of one warp, bytes that it gathers of each at a time, and how many such programs fill a GPU: each
# takes as many tokens as leave so many, since it writes as many sums as of one.
_GATHERED, _AT_ONCE, _FULL = 128, 16, 8192


class OfBags(NamedTuple):
    """Errors x_hat − y [n_tokens, d_out], also as `narrow` in the type of the rows of which x_hat is made, and sums."""

    errors: Tensor
    narrow: Tensor
    x_hat: Tensor
    sums: Sums


class Nested(NamedTuple):
    """What the prefixes of 1, 2, ... levels miss, `errors` [n_tokens, n_levels, d_out]; the reconstruction by all of
    them, `x_hat` [n_tokens, d_out], with its sums; and Σ‖error‖² of all other prefixes together, `inner`, 0-dim."""

    errors: Tensor
    x_hat: Tensor
    sums: Sums
    inner: Tensor


def fits(y: Tensor, *others: Tensor) -> bool:
    """Tell whether the kernels can take targets y and what is of their kind."""
    return y.numel() > 0 and all(one.dtype == torch.float32 for one in (y, *others))


def errors_of(y: Tensor, x_hat: Tensor, y_mean: Tensor) -> tuple[Tensor, Sums]:
    """Return x_hat − y [n_tokens, d_out], for y_mean [d_out], and the sums of both over tokens."""
    errors = torch.empty_like(y, memory_format=torch.contiguous_format)
    error, centred, *_ = _summed(errors, None, y, x_hat[:, None], None, y_mean)
    return errors, Sums(error, centred)


def nested(parts: Tensor, offset: Tensor, y: Tensor, y_mean: Tensor) -> Nested:
    """Sum what all levels add, parts [n_tokens, n_levels, d_out] to `offset`, [d_out] or [n_tokens, d_out]."""
    errors = torch.empty_like(parts, memory_format=torch.contiguous_format)
    x_hat = torch.empty_like(y, memory_format=torch.contiguous_format)
    error, centred, *inner = _summed(errors, x_hat, y, parts, offset, y_mean)
    return Nested(errors, x_hat, Sums(error, centred), inner[0].square if inner else error.square.new_zeros(()))


def nested_bags(acts: SparseActs, rows: Tensor, n_levels: int, offset: Tensor, y: Tensor, y_mean: Tensor) -> Nested:
    """Return what `nested` does of activations whose places have a token's levels as tokens, and rows [d_sae, d_out].

    What each level adds to the `offset` [d_out] is summed on the way, entry by entry, and never written.
    """
    errors, x_hat = (
        y.new_empty(len(y), n_levels, y.shape[1]),
        torch.empty_like(y, memory_format=torch.contiguous_format),
    )
    return Nested(errors, x_hat, *_fill_of_bags(errors, x_hat, None, acts, rows, offset, y, y_mean))


def errors_of_bags(acts: SparseActs, rows: Tensor, offset: Tensor, y: Tensor, y_mean: Tensor) -> OfBags:
    """Return the errors of what activations write of rows [d_sae, d_out] beside the `offset` [d_out]."""
    errors, x_hat = (torch.empty_like(y, memory_format=torch.contiguous_format) for _ in range(2))
    narrow = None if rows.dtype == y.dtype else torch.empty_like(errors, dtype=rows.dtype)
    sums, _ = _fill_of_bags(errors[:, None], x_hat, narrow, acts, rows, offset, y, y_mean)
    return OfBags(errors, errors if narrow is None else narrow, x_hat, sums)


def _fill_of_bags(
    errors: Tensor,
    x_hat: Tensor,
    narrow: Tensor | None,
    acts: SparseActs,
    rows: Tensor,
    offset: Tensor,
    y: Tensor,
    y_mean: Tensor,
) -> tuple[Sums, Tensor]:
    """Fill `errors` [n_tokens, n_levels, d_out], those of all levels `narrow` and x_hat; return all that is summed."""
    (n_tokens, n_columns), n_levels, places = y.shape, errors.shape[1], acts.places
    n_blocks = triton.cdiv(n_columns, _GATHERED)
    of_program = max(n_tokens * n_blocks // _FULL, 1)
    grid = triton.cdiv(n_tokens, of_program), n_blocks
    totals, squares = y.new_empty(grid[0], 2, n_columns), y.new_empty(3, *grid)
    entries = acts.values.contiguous(), places.latents, places.starts, rows.contiguous()
    tensors = errors, x_hat, narrow, totals, squares, y.contiguous(), y_mean, offset.contiguous(), *entries
    n_filled = None if places.filled is None else places.filled.n
    sizes = len(acts.values), n_tokens, n_levels, n_columns, of_program
    shape = {"ENTRIES": _AT_ONCE // rows.itemsize, "COLUMNS": _GATHERED, "num_warps": 1, "enable_fp_fusion": True}
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(y):
        _nest_bags[grid](*tensors, n_filled, *sizes, **shape)
    error, centred, inner = squares.sum(dim=(1, 2))
    of_errors, of_targets = totals.sum(dim=0)
    return Sums(Moments(error, of_errors), Moments(centred, of_targets)), inner


def nested_gradients(
    errors: Tensor, of_whole: Tensor, of_inner: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return the gradients of parts [n_tokens, n_levels, d_out] from those of Σ‖error‖² of all levels and of the other
    prefixes, 0-dim; they have `dtype`. Summed over tokens those of an offset are fp32 [d_out]."""
    n_rows, n_levels, n_columns = errors.shape
    out, grid = torch.empty_like(errors, dtype=dtype), _grid(n_rows, n_columns)
    sums = errors.new_empty(grid[0], n_columns)
    with torch.cuda.device_of(errors):
        _sum_gradients[grid](out, sums, errors, of_whole, of_inner, n_rows, n_columns, LEVELS=n_levels, ROWS=2, **_TILE)
    return out, sums.sum(dim=0)


def add_and_square(part: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight · Σ(part + other)², 0-dim, and 2 · (part + other) in the type of `part`, which may have 16 bits.

    The weight, 0-dim, is no part of what is to be the gradient, which would be rounded twice; 2 rounds nothing. Both
    matrices are [n_rows, n_columns]; rows of `other` need not follow each other, as those of one level's errors do not.
    """
    twice, (n_rows, n_columns) = torch.empty_like(part, memory_format=torch.contiguous_format), part.shape
    other = other if other.stride(1) == 1 else other.contiguous()
    grid = triton.cdiv(n_rows, _ADDED["ROWS"]), triton.cdiv(n_columns, _ADDED["COLUMNS"])
    squares = other.new_empty(grid)
    if part.numel():
        with torch.cuda.device_of(part):
            tensors, sizes = (twice, squares, part.contiguous(), other, weight), (other.stride(0), n_rows, n_columns)
            _add_and_square[grid](*tensors, *sizes, **_ADDED, num_warps=8)
    return squares.sum(), twice


def _summed(
    errors: Tensor, x_hat: Tensor | None, y: Tensor, parts: Tensor, offset: Tensor | None, y_mean: Tensor
) -> list[Moments]:
    """Fill `errors` and `x_hat`; return the moments of x_hat − y, of y − y_mean and, of several levels, of the others'
    errors, which have no total."""
    (n_rows, n_columns), n_levels = y.shape, parts.shape[1]
    n_moments = 2 if n_levels == 1 else 3
    grid = _grid(n_rows, n_columns)
    sums = y.new_empty(grid[0], 2 * n_moments, n_columns)
    stride = 0 if offset is None or offset.dim() == 1 else n_columns
    offset = None if offset is None else offset.contiguous()
    tensors = errors, sums, x_hat, y.contiguous(), parts.contiguous(), offset, y_mean
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(y):
        sizes = {"LEVELS": n_levels, "MOMENTS": n_moments, "ROWS": 4 if n_levels == 1 else 2}
        _sum_errors[grid](*tensors, stride, n_rows, n_columns, **sizes, **_TILE)
    totals, squares = sums.sum(dim=0).chunk(2)
    return [Moments(*pair) for pair in zip(squares.sum(dim=1), totals, strict=True)]


def _grid(n_rows: int, n_columns: int) -> tuple[int, int]:
    return triton.cdiv(n_rows, _TILE["OF_PROGRAM"]), triton.cdiv(n_columns, _TILE["COLUMNS"])


def try_out(device: torch.device) -> None:
    """Run every kernel once; raise what Triton raises where it cannot, and `RuntimeError` where results are wrong."""
    y = torch.arange(40 * 130, device=device).view(40, 130).remainder(7).float()
    errors, sums = errors_of(y, 3 - y, y[0])
    centred = y - y[0]
    expected = errors.square().sum(), errors.sum(dim=0), centred.square().sum(), centred.sum(dim=0)
    assert sums.centred is not None, "the kernel sums both"
    are_right = [(one == other).all() for one, other in zip((*sums.error, *sums.centred), expected, strict=True)]
    levels = nested(y[:, None].expand(-1, 2, -1), y[0], y, y[0])
    are_right += _are_right_of_bags(y[:5])
    gradients, total = nested_gradients(levels.errors, y.new_ones(()), y.new_ones(()))
    # Every card knows fp16; Triton 3.2 compiles no bf16 for those before sm_80.
    square, twice = add_and_square(y.half(), y, y[0, 2])
    are_right += [(levels.x_hat == 2 * y + y[0]).all(), levels.inner == (y[0].square().sum() * len(y))]
    are_right += [(gradients[:, 1] == 2 * (y + y[0])).all(), (gradients[:, 0] == 2 * y + 4 * y[0]).all()]
    are_right += [(total == gradients[:, 0].sum(dim=0)).all(), square == 8 * y.square().sum(), (twice == 4 * y).all()]
    if not (errors == 3 - 2 * y).all() or not all(are_right):
        raise RuntimeError("the kernels give wrong results")


def _are_right_of_bags(y: Tensor) -> list[Tensor]:
    """Try an entry of each of two levels of every token, and one that does not count."""
    entries = torch.arange(2 * len(y) + 1, device=y.device)
    filled = Filled(entries[-1], len(entries) - 1)
    acts = SparseActs(1.0 + entries % 2, Places(entries % 2, entries // 2, entries[:-1], filled), 2)
    found = nested_bags(acts, y[:2].half(), 2, y[2], y, y[0])
    expected = nested(torch.stack([y[0], 2 * y[1]]).expand(len(y), -1, -1), y[2], y, y[0])
    return [(one == other).all() for one, other in zip(_tensors(found), _tensors(expected), strict=True)]


def _tensors(found: Nested) -> tuple[Tensor, ...]:
    assert found.sums.centred is not None, "the kernels sum both"
    return found.errors, found.x_hat, found.inner, *found.sums.error, *found.sums.centred


@triton.jit
def _sum_errors(
    out_errors, out_sums, out_x_hat, y, parts, offset, y_mean, offset_stride, n_rows, n_columns,
    LEVELS: tl.constexpr, MOMENTS: tl.constexpr, OF_PROGRAM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the errors of some rows and columns; sum them, the targets, and the squares of both over the rows."""
    program = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mean = tl.load(y_mean + columns, mask=columns < n_columns, other=0)
    errors = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    squared_errors, targets, squared_targets, inner = errors, errors, errors, errors
    for begin in range(0, OF_PROGRAM, ROWS):
        rows = program * OF_PROGRAM + begin + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        rows = rows.to(tl.int64)[:, None]
        target = tl.load(y + rows * n_columns + columns[None, :], mask=inside, other=0)
        error = -target
        if offset is not None:
            error += tl.load(offset + rows * offset_stride + columns[None, :], mask=inside, other=0)
        for level in tl.static_range(LEVELS):
            places = (rows * LEVELS + level) * n_columns + columns[None, :]
            error += tl.load(parts + places, mask=inside, other=0)
            tl.store(out_errors + places, error, mask=inside)
            if level < LEVELS - 1:
                inner += error * error
        if out_x_hat is not None:
            tl.store(out_x_hat + rows * n_columns + columns[None, :], target + error, mask=inside)
        centred = tl.where(inside, target - mean[None, :], 0)
        errors += error
        squared_errors += error * error
        targets += centred
        squared_targets += centred * centred
    at = out_sums + program.to(tl.int64) * 2 * MOMENTS * n_columns + columns
    tl.store(at, tl.sum(errors, axis=0), mask=columns < n_columns)
    tl.store(at + n_columns, tl.sum(targets, axis=0), mask=columns < n_columns)
    squares = at + MOMENTS * n_columns
    tl.store(squares, tl.sum(squared_errors, axis=0), mask=columns < n_columns)
    tl.store(squares + n_columns, tl.sum(squared_targets, axis=0), mask=columns < n_columns)
    if MOMENTS == 3:
        tl.store(at + 2 * n_columns, tl.zeros([COLUMNS], dtype=tl.float32), mask=columns < n_columns)
        tl.store(squares + 2 * n_columns, tl.sum(inner, axis=0), mask=columns < n_columns)


@triton.jit
def _nest_bags(
    out_errors, out_x_hat, out_narrow, out_totals, out_squares, y, y_mean, offset, values, indices, starts, rows,
    n_filled, n_entries, n_tokens, n_levels, n_columns, of_program, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up entries of some tokens in one block of columns; where one of a token's levels ends, write its error.

    Sum errors of the whole and targets over the tokens, and the squares of both and of all other levels' errors.
    """
    program, block = tl.program_id(0), tl.program_id(1)
    first_token, n_bags = program * of_program, n_tokens * n_levels
    # Four columns a thread: with as many as a thread reads of bf16 at once two would hold the same sums.
    columns = tl.max_contiguous(block * COLUMNS + tl.arange(0, COLUMNS), 4)
    inside = columns < n_columns
    end = n_entries if n_filled is None else tl.load(n_filled)
    before = first_token.to(tl.int64) * n_columns
    y, out_x_hat, out_errors = y + before, out_x_hat + before, out_errors + before * n_levels
    errors = tl.zeros([COLUMNS], dtype=tl.float32)
    targets, squared_errors, squared_targets, inner = errors, errors, errors, errors
    last = tl.load(starts + first_token * n_levels).to(tl.int32)
    for token in range(tl.minimum(of_program, n_tokens - first_token)):
        target = tl.load(y + token * n_columns + columns, mask=inside, other=0)
        error = tl.load(offset + columns, mask=inside, other=0) - target
        for level in range(n_levels):
            # Here, of the level before: at the end sm_70 spilled.
            if level > 0:
                inner += error * error
            first, after = last, (first_token + token) * n_levels + level + 1
            last = tl.load(starts + after, mask=after < n_bags, other=end).to(tl.int32)
            for begin in range(first, last, ENTRIES):
                entries = begin + tl.arange(0, ENTRIES)
                value = tl.load(values + entries, mask=entries < last, other=0).to(tl.float32)
                error += tl.sum(value[:, None] * gather(rows, indices, entries, last, columns, n_columns), axis=0)
            tl.store(out_errors + (token * n_levels + level) * n_columns + columns, error, mask=inside)
        tl.store(out_x_hat + token * n_columns + columns, target + error, mask=inside)
        if out_narrow is not None:
            place = out_narrow + before + token * n_columns + columns
            tl.store(place, error.to(out_narrow.dtype.element_ty), mask=inside)
        centred = target - tl.load(y_mean + columns, mask=inside, other=0)
        errors += error
        targets += centred
        squared_errors += error * error
        squared_targets += centred * centred
    at = out_totals + program.to(tl.int64) * 2 * n_columns + columns
    tl.store(at, errors, mask=inside)
    tl.store(at + n_columns, targets, mask=inside)
    at, n_programs = out_squares + program * tl.num_programs(1) + block, tl.num_programs(0) * tl.num_programs(1)
    tl.store(at, tl.sum(squared_errors, axis=0))
    tl.store(at + n_programs, tl.sum(squared_targets, axis=0))
    tl.store(at + 2 * n_programs, tl.sum(inner, axis=0))


@triton.jit
def _sum_gradients(
    out, out_sums, errors, of_whole, of_inner, n_rows, n_columns,
    LEVELS: tl.constexpr, OF_PROGRAM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of all levels: each is that of the next one, and what its own prefix adds; sum the first."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    whole, inner = 2 * tl.load(of_whole), 2 * tl.load(of_inner)
    totals = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, OF_PROGRAM, ROWS):
        rows = tl.program_id(0) * OF_PROGRAM + begin + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        gradient = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for below in tl.static_range(LEVELS):
            places = (rows.to(tl.int64)[:, None] * LEVELS + LEVELS - 1 - below) * n_columns + columns[None, :]
            error = tl.load(errors + places, mask=inside, other=0)
            if below == 0:
                gradient = whole * error
            else:
                gradient += inner * error
            tl.store(out + places, gradient.to(out.dtype.element_ty), mask=inside)
        totals += gradient
    at = out_sums + tl.program_id(0).to(tl.int64) * n_columns + columns
    tl.store(at, tl.sum(totals, axis=0), mask=columns < n_columns)


@triton.jit
def _add_and_square(
    out_twice, out_squares, part, other, weight, other_stride, n_rows, n_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add some numbers of two matrices; write it twice as large, and sum its squares with their weight."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    places, inside = rows * n_columns + columns, (rows < n_rows) & (columns < n_columns)
    each = tl.load(part + places, mask=inside, other=0).to(tl.float32)
    each += tl.load(other + rows * other_stride + columns, mask=inside, other=0)
    tl.store(out_twice + places, (2 * each).to(out_twice.dtype.element_ty), mask=inside)
    square = tl.sum(tl.sum(each * each, axis=1), axis=0)
    tl.store(out_squares + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), square * tl.load(weight))
